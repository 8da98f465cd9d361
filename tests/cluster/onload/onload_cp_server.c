/* Stands for the control plane server: with --daemonise it becomes a background process in the given network namespace
 * and writes its arguments and that namespace into a file beside itself. It serves nothing.
 */

#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void write_record(char **words)
{
    char path[64], temporary[80];
    struct stat namespace;
    FILE *record;

    if (stat("/proc/self/ns/net", &namespace))
        fail("/proc/self/ns/net");
    snprintf(path, sizeof path, "/mnt/onload/server.%ld", (long)getpid());
    snprintf(temporary, sizeof temporary, "%s.new", path);
    if (!(record = fopen(temporary, "w")))
        fail(temporary);
    fprintf(record, "%lu\n", (unsigned long)namespace.st_ino);
    for (; *words; words++)
        fprintf(record, "%s\n", *words);
    if (fclose(record) || rename(temporary, path))
        fail(path);
}

int main(int count, char **words)
{
    int daemonise = 0, number;

    for (number = 1; number < count; number++) {
        if (!strcmp(words[number], "--daemonise"))
            daemonise = 1;
        if (!strcmp(words[number], "--network-namespace-file") && number + 1 < count) {
            int namespace = open(words[number + 1], O_RDONLY | O_CLOEXEC);

            if (namespace < 0 || setns(namespace, CLONE_NEWNET))
                fail(words[number + 1]);
        }
    }
    if (daemonise && daemon(0, 0))
        fail("daemon");
    write_record(words + 1);
    for (;;)
        pause();
}
