/*
 * The FPGA hook and the FPGA tool as one static program: Python's interpreter, and in its memory all modules that the two
 * commands import (fpga_host.py puts them there). Nothing is read from the host but what the commands themselves read:
 * no library, no Python, no environment variable, no working directory.
 *
 * The file name in the auxiliary vector (AT_EXECFN) selects the command. argv[0] is not used: the caller can set it to
 * anything.
 */
#include <Python.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

#define MODULE(number, name, size, package) extern const unsigned char module_##number[];
#include "modules.h"
#undef MODULE

static const struct _frozen modules[] = {
#define MODULE(number, name, size, package) {name, module_##number, size, package, NULL},
#include "modules.h"
#undef MODULE
    {NULL, NULL, 0, 0, NULL},
};

/* In place of the library's own table: what is not named here is not linked. */
#define BUILTIN(name, init) extern PyObject *init(void);
#include "builtins.h"
#undef BUILTIN

struct _inittab _PyImport_Inittab[] = {
#define BUILTIN(name, init) {name, init},
#include "builtins.h"
#undef BUILTIN
    {"builtins", NULL},
    {"sys", NULL},
    {NULL, NULL},
};

static void check(PyStatus status) {
    if (PyStatus_Exception(status)) Py_ExitStatusException(status);
}

static void set(PyConfig *config, wchar_t **field, const wchar_t *text) {
    check(PyConfig_SetString(config, field, text));
}

int main(int argc, char **argv) {
    const char *path = (const char *)getauxval(AT_EXECFN);
    const char *slash = path ? strrchr(path, '/') : NULL;
    const char *name = slash ? slash + 1 : path ? path : "";
    const char *command = strstr(name, "hook") ? "accelplane.cli.fpgahook" : "accelplane.cli.fpgatool";

    PyPreConfig before;
    PyPreConfig_InitIsolatedConfig(&before);
    before.utf8_mode = 1;
    PyImport_FrozenModules = modules;
    check(Py_PreInitialize(&before));

    PyConfig config;
    PyConfig_InitIsolatedConfig(&config);
    config.site_import = 0;
    config.write_bytecode = 0;
    config.parse_argv = 0;
    config.module_search_paths_set = 1;
    /* Said here, so that it is not looked for. */
    wchar_t **places[] = {&config.home, &config.program_name, &config.executable, &config.base_executable,
                          &config.prefix, &config.exec_prefix, &config.base_prefix, &config.base_exec_prefix,
                          &config.stdlib_dir};
    for (size_t place = 0; place < sizeof places / sizeof *places; place++) set(&config, places[place], L"/");
    check(PyConfig_SetBytesArgv(&config, argc, argv));
    check(Py_InitializeFromConfig(&config));
    PyConfig_Clear(&config);
    PyGC_Disable(); /* it is over before there would be anything to collect */

    int status = 1;
    PyObject *module = PyImport_ImportModule(command);
    PyObject *answer = module ? PyObject_CallMethod(module, "main", NULL) : NULL;
    if (answer)
        status = (int)PyLong_AsLong(answer);
    else
        PyErr_Print(); /* SystemExit ends it here, with its own status */
    /* Nothing is put away: the kernel does that in less than the 4 ms that the interpreter would take. */
    for (int stream = 0; stream < 2; stream++) {
        PyObject *file = PySys_GetObject(stream ? "stderr" : "stdout");
        if (file && file != Py_None && !PyObject_CallMethod(file, "flush", NULL) && !status) status = 1;
    }
    _exit(status);
}
