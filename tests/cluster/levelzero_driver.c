/* A Level-Zero driver for tests: its devices, readings and faults are in a file, which each call reads anew.
 *
 * The loader loads it if ZE_ENABLE_ALT_DRIVERS is its path. LEVELZERO_TEST_STATE is the path of the file, which has lines
 * `KEY VALUE`; driver.py describes the keys. Compiled against the headers of the loader.
 */
#define _GNU_SOURCE
#include <level_zero/ze_ddi.h>
#include <level_zero/zes_ddi.h>
#include <level_zero/zet_ddi.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEVICES 16
#define PARTS 16

struct part {
    int device, index;
};

static struct part devices[DEVICES], modules[DEVICES][PARTS], sensors[DEVICES][PARTS];
static int drivers[PARTS];

/* Copies the value of the last line with a key to `value`; returns 0 if there is none. */
static int lookup(const char *key, char *value, size_t size) {
    char line[512];
    int found = 0;
    const char *path = getenv("LEVELZERO_TEST_STATE");
    FILE *file = path ? fopen(path, "re") : NULL;
    if (!file)
        return 0;
    while (fgets(line, sizeof line, file)) {
        char *blank = strchr(line, ' ');
        if (!blank)
            continue;
        *blank = 0;
        if (strcmp(line, key))
            continue;
        blank[1 + strcspn(blank + 1, "\n")] = 0;
        snprintf(value, size, "%s", blank + 1);
        found = 1;
    }
    fclose(file);
    return found;
}

static long number(const char *key, long otherwise) {
    char value[64];
    return lookup(key, value, sizeof value) ? strtol(value, NULL, 0) : otherwise;
}

static const char *of_device(int device, const char *name) {
    static char key[96];
    snprintf(key, sizeof key, "%d.%s", device, name);
    return key;
}

static ze_result_t fault(const char *key) {
    char value[64];
    if (!lookup(key, value, sizeof value))
        return ZE_RESULT_SUCCESS;
    if (!strcmp(value, "hang"))
        for (;;)
            pause();
    if (!strcmp(value, "crash"))
        raise(SIGSEGV);
    if (!strcmp(value, "abort"))
        abort();
    if (!strcmp(value, "exit"))
        _exit(3);
    if (!strcmp(value, "print")) {
        puts("= 0 garbage on standard output");
        fflush(stdout);
        return ZE_RESULT_SUCCESS;
    }
    return (ze_result_t)strtoul(value, NULL, 0);
}

/* What a function returns: a fault of its device, or of all. */
static ze_result_t result_of(const char *function, int device) {
    ze_result_t result = device < 0 ? ZE_RESULT_SUCCESS : fault(of_device(device, function));
    return result ? result : fault(function);
}

/* The n-th of the words `A:B` of a value, which has `count` words. */
static int words(const char *text, int index, double *first, double *second) {
    int count = 0;
    char copy[512], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char *colon = strchr(word, ':');
        if (count++ == index && colon) {
            *first = strtod(word, NULL);
            *second = strtod(colon + 1, NULL);
        }
    }
    return count;
}

static int part_of(int device, const char *name, const char *otherwise, int index, double *first, double *second) {
    char value[512];
    if (!lookup(of_device(device, name), value, sizeof value))
        snprintf(value, sizeof value, "%s", otherwise);
    return words(value, index, first, second);
}

static int memory_of(int device, int index, double *health, double *size) {
    return part_of(device, "memory", "1:17179869184", index, health, size);
}

static int sensor_of(int device, int index, double *kind, double *celsius) {
    return part_of(device, "sensors", "0:40 1:41 2:42", index, kind, celsius);
}

static ze_result_t list(uint32_t *count, void **handles, uint32_t available, void *first, size_t size) {
    if (handles)
        for (uint32_t index = 0; index < *count && index < available; index++)
            handles[index] = (char *)first + index * size;
    if (!handles || *count > available)
        *count = available;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t init(ze_init_flags_t flags) {
    (void)flags;
    return result_of("zeInit", -1);
}

static ze_result_t sysman_init(zes_init_flags_t flags) {
    (void)flags;
    return result_of("zesInit", -1);
}

static ze_result_t get_drivers(const char *function, uint32_t *count, void **handles) {
    ze_result_t result = result_of(function, -1);
    return result ? result : list(count, handles, number("drivers", 1), drivers, sizeof drivers[0]);
}

static ze_result_t driver_get(uint32_t *count, ze_driver_handle_t *handles) {
    return get_drivers("zeDriverGet", count, (void **)handles);
}

static ze_result_t sysman_driver_get(uint32_t *count, zes_driver_handle_t *handles) {
    return get_drivers("zesDriverGet", count, (void **)handles);
}

/* The loader sorts drivers by their devices and asks for extensions. */
static ze_result_t driver_properties(ze_driver_handle_t driver, ze_driver_properties_t *properties) {
    (void)driver;
    properties->driverVersion = 1;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t driver_extensions(ze_driver_handle_t driver, uint32_t *count, ze_driver_extension_properties_t *found) {
    (void)driver;
    (void)found;
    *count = 0;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t get_devices(const char *function, uint32_t *count, void **handles) {
    ze_result_t result = result_of(function, -1);
    for (int device = 0; device < DEVICES; device++)
        devices[device].device = device;
    return result ? result : list(count, handles, number("devices", 1), devices, sizeof devices[0]);
}

static ze_result_t device_get(ze_driver_handle_t driver, uint32_t *count, ze_device_handle_t *handles) {
    (void)driver;
    return get_devices("zeDeviceGet", count, (void **)handles);
}

static ze_result_t sysman_device_get(zes_driver_handle_t driver, uint32_t *count, zes_device_handle_t *handles) {
    (void)driver;
    return get_devices("zesDeviceGet", count, (void **)handles);
}

static ze_result_t device_properties(ze_device_handle_t handle, ze_device_properties_t *properties) {
    int device = ((struct part *)handle)->device;
    ze_result_t result = result_of("zeDeviceGetProperties", device);
    if (result || properties->stype != ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES)
        return result ? result : ZE_RESULT_ERROR_INVALID_ARGUMENT;
    properties->vendorId = (uint32_t)number(of_device(device, "vendor"), 0x8086);
    return ZE_RESULT_SUCCESS;
}

static ze_result_t sysman_properties(zes_device_handle_t handle, zes_device_properties_t *properties) {
    int device = ((struct part *)handle)->device;
    ze_result_t result = result_of("zesDeviceGetProperties", device);
    zes_device_ext_properties_t *extension = properties->pNext;
    if (result || !extension || extension->stype != ZES_STRUCTURE_TYPE_DEVICE_EXT_PROPERTIES)
        return result ? result : ZE_RESULT_ERROR_INVALID_ARGUMENT;
    if (number(of_device(device, "integrated"), 0))
        extension->flags |= ZES_DEVICE_PROPERTY_FLAG_INTEGRATED;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t pci_properties(zes_device_handle_t handle, zes_pci_properties_t *properties) {
    int device = ((struct part *)handle)->device;
    char bdf[64];
    ze_result_t result = result_of("zesDevicePciGetProperties", device);
    if (result || properties->stype != ZES_STRUCTURE_TYPE_PCI_PROPERTIES)
        return result ? result : ZE_RESULT_ERROR_INVALID_ARGUMENT;
    if (!lookup(of_device(device, "bdf"), bdf, sizeof bdf))
        snprintf(bdf, sizeof bdf, "0000:%02x:00.0", 3 + device);
    zes_pci_address_t *address = &properties->address;
    if (sscanf(bdf, "%x:%x:%x.%x", &address->domain, &address->bus, &address->device, &address->function) != 4)
        return ZE_RESULT_ERROR_UNKNOWN;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t pci_state(zes_device_handle_t handle, zes_pci_state_t *state) {
    int device = ((struct part *)handle)->device;
    ze_result_t result = result_of("zesDevicePciGetState", device);
    if (result || state->stype != ZES_STRUCTURE_TYPE_PCI_STATE)
        return result ? result : ZE_RESULT_ERROR_INVALID_ARGUMENT;
    state->qualityIssues = (uint32_t)number(of_device(device, "quality"), 0);
    return ZE_RESULT_SUCCESS;
}

static ze_result_t get_parts(const char *function, struct part parts[PARTS], int device, int available, uint32_t *count,
                             void **handles) {
    ze_result_t result = result_of(function, device);
    for (int index = 0; index < PARTS; index++)
        parts[index] = (struct part){device, index};
    return result ? result : list(count, handles, (uint32_t)available, parts, sizeof parts[0]);
}

static ze_result_t memory_modules(zes_device_handle_t handle, uint32_t *count, zes_mem_handle_t *handles) {
    int device = ((struct part *)handle)->device;
    double health, size;
    int available = memory_of(device, -1, &health, &size);
    return get_parts("zesDeviceEnumMemoryModules", modules[device], device, available, count, (void **)handles);
}

static ze_result_t memory_state(zes_mem_handle_t handle, zes_mem_state_t *state) {
    struct part *part = (struct part *)handle;
    double health = 0, size = 0;
    ze_result_t result = result_of("zesMemoryGetState", part->device);
    if (result || state->stype != ZES_STRUCTURE_TYPE_MEM_STATE)
        return result ? result : ZE_RESULT_ERROR_INVALID_ARGUMENT;
    memory_of(part->device, part->index, &health, &size);
    state->health = (zes_mem_health_t)health;
    state->size = (uint64_t)size;
    state->free = state->size;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t temperature_sensors(zes_device_handle_t handle, uint32_t *count, zes_temp_handle_t *handles) {
    int device = ((struct part *)handle)->device;
    double kind, celsius;
    int available = sensor_of(device, -1, &kind, &celsius);
    return get_parts("zesDeviceEnumTemperatureSensors", sensors[device], device, available, count, (void **)handles);
}

static ze_result_t temperature_properties(zes_temp_handle_t handle, zes_temp_properties_t *properties) {
    struct part *part = (struct part *)handle;
    double kind = 0, celsius;
    ze_result_t result = result_of("zesTemperatureGetProperties", part->device);
    if (result || properties->stype != ZES_STRUCTURE_TYPE_TEMP_PROPERTIES)
        return result ? result : ZE_RESULT_ERROR_INVALID_ARGUMENT;
    sensor_of(part->device, part->index, &kind, &celsius);
    properties->type = (zes_temp_sensors_t)kind;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t temperature_state(zes_temp_handle_t handle, double *celsius) {
    struct part *part = (struct part *)handle;
    double kind;
    ze_result_t result = result_of("zesTemperatureGetState", part->device);
    if (!result)
        sensor_of(part->device, part->index, &kind, celsius);
    return result;
}

#define TABLE(NAME, TYPE, ...)                                                                                         \
    ZE_DLLEXPORT ze_result_t ZE_APICALL NAME(ze_api_version_t version, TYPE *table) {                                  \
        (void)version;                                                                                                 \
        TYPE filled = {__VA_ARGS__};                                                                                   \
        *table = filled;                                                                                               \
        return ZE_RESULT_SUCCESS;                                                                                      \
    }

TABLE(zeGetGlobalProcAddrTable, ze_global_dditable_t, .pfnInit = init)
TABLE(zeGetDriverProcAddrTable, ze_driver_dditable_t, .pfnGet = driver_get, .pfnGetProperties = driver_properties,
      .pfnGetExtensionProperties = driver_extensions)
TABLE(zeGetDeviceProcAddrTable, ze_device_dditable_t, .pfnGet = device_get, .pfnGetProperties = device_properties)
TABLE(zesGetGlobalProcAddrTable, zes_global_dditable_t, .pfnInit = sysman_init)
TABLE(zesGetDriverProcAddrTable, zes_driver_dditable_t, .pfnGet = sysman_driver_get)
TABLE(zesGetDeviceProcAddrTable, zes_device_dditable_t, .pfnGet = sysman_device_get,
      .pfnGetProperties = sysman_properties, .pfnPciGetProperties = pci_properties, .pfnPciGetState = pci_state,
      .pfnEnumMemoryModules = memory_modules, .pfnEnumTemperatureSensors = temperature_sensors)
TABLE(zesGetMemoryProcAddrTable, zes_memory_dditable_t, .pfnGetState = memory_state)
TABLE(zesGetTemperatureProcAddrTable, zes_temperature_dditable_t, .pfnGetProperties = temperature_properties,
      .pfnGetState = temperature_state)

/* The loader refuses a driver without the other tables. */
#define NO_FUNCTIONS(NAME, TYPE)                                                                                       \
    ZE_DLLEXPORT ze_result_t ZE_APICALL NAME##ProcAddrTable(ze_api_version_t version, TYPE *table) {                   \
        (void)version;                                                                                                 \
        (void)table;                                                                                                   \
        return ZE_RESULT_SUCCESS;                                                                                      \
    }

NO_FUNCTIONS(zeGetContext, ze_context_dditable_t)
NO_FUNCTIONS(zeGetCommandQueue, ze_command_queue_dditable_t)
NO_FUNCTIONS(zeGetCommandList, ze_command_list_dditable_t)
NO_FUNCTIONS(zeGetImage, ze_image_dditable_t)
NO_FUNCTIONS(zeGetMem, ze_mem_dditable_t)
NO_FUNCTIONS(zeGetFence, ze_fence_dditable_t)
NO_FUNCTIONS(zeGetEventPool, ze_event_pool_dditable_t)
NO_FUNCTIONS(zeGetEvent, ze_event_dditable_t)
NO_FUNCTIONS(zeGetModule, ze_module_dditable_t)
NO_FUNCTIONS(zeGetModuleBuildLog, ze_module_build_log_dditable_t)
NO_FUNCTIONS(zeGetKernel, ze_kernel_dditable_t)
NO_FUNCTIONS(zeGetSampler, ze_sampler_dditable_t)
NO_FUNCTIONS(zeGetPhysicalMem, ze_physical_mem_dditable_t)
NO_FUNCTIONS(zeGetVirtualMem, ze_virtual_mem_dditable_t)
NO_FUNCTIONS(zesGetOverclock, zes_overclock_dditable_t)
NO_FUNCTIONS(zesGetScheduler, zes_scheduler_dditable_t)
NO_FUNCTIONS(zesGetPerformanceFactor, zes_performance_factor_dditable_t)
NO_FUNCTIONS(zesGetPower, zes_power_dditable_t)
NO_FUNCTIONS(zesGetFrequency, zes_frequency_dditable_t)
NO_FUNCTIONS(zesGetEngine, zes_engine_dditable_t)
NO_FUNCTIONS(zesGetStandby, zes_standby_dditable_t)
NO_FUNCTIONS(zesGetFirmware, zes_firmware_dditable_t)
NO_FUNCTIONS(zesGetFabricPort, zes_fabric_port_dditable_t)
NO_FUNCTIONS(zesGetPsu, zes_psu_dditable_t)
NO_FUNCTIONS(zesGetFan, zes_fan_dditable_t)
NO_FUNCTIONS(zesGetLed, zes_led_dditable_t)
NO_FUNCTIONS(zesGetRas, zes_ras_dditable_t)
NO_FUNCTIONS(zesGetDiagnostics, zes_diagnostics_dditable_t)
NO_FUNCTIONS(zetGetDevice, zet_device_dditable_t)
NO_FUNCTIONS(zetGetContext, zet_context_dditable_t)
NO_FUNCTIONS(zetGetCommandList, zet_command_list_dditable_t)
NO_FUNCTIONS(zetGetModule, zet_module_dditable_t)
NO_FUNCTIONS(zetGetKernel, zet_kernel_dditable_t)
NO_FUNCTIONS(zetGetMetric, zet_metric_dditable_t)
NO_FUNCTIONS(zetGetMetricGroup, zet_metric_group_dditable_t)
NO_FUNCTIONS(zetGetMetricStreamer, zet_metric_streamer_dditable_t)
NO_FUNCTIONS(zetGetMetricQueryPool, zet_metric_query_pool_dditable_t)
NO_FUNCTIONS(zetGetMetricQuery, zet_metric_query_dditable_t)
NO_FUNCTIONS(zetGetDebug, zet_debug_dditable_t)
NO_FUNCTIONS(zetGetTracerExp, zet_tracer_exp_dditable_t)
