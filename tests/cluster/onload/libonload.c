/* Stands for the Onload library: it reports that it is loaded, and its version. It accelerates nothing. */

#include <string.h>
#include <unistd.h>

const char *onload_version(void) { return VERSION; }

__attribute__((constructor)) static void report(void)
{
    static const char text[] = "onload " VERSION " preloaded\n";

    if (write(STDERR_FILENO, text, strlen(text)) < 0)
        _exit(1);
}
