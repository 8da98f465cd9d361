/* Stands for the extensions library: applications may ask it whether Onload is loaded. */

extern const char *onload_version(void) __attribute__((weak));

int onload_is_present(void) { return onload_version != 0; }
