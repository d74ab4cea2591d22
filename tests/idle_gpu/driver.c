/* A driver of GPUs that do nothing, in the place of libcuda.so.1: modules load and kernels start, but none
   runs. CUDA's runtime, Triton and Inductor ask it. Numbers are those of cuda.h. */

#include "idle_gpu.h"
#include <dlfcn.h>

static char anything; /* Its address stands for every context, module and function. */

long idle_gpu_setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value ? atol(value) : otherwise;
}

int idle_gpu_count(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int is_hidden = visible && (!visible[0] || visible[0] == '-');
    return is_hidden ? 0 : idle_gpu_setting("IDLE_GPU_COUNT", 1);
}

int cuInit(unsigned flags) {
    return idle_gpu_count() ? 0 : 100;
}

int cuDriverGetVersion(int *version) {
    *version = idle_gpu_setting("IDLE_GPU_DRIVER", 13000);
    return 0;
}

/* An H100's; the runtime numbers attributes as the driver does. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const int values[128] = {
        [1] = 1024, 1024, 1024, 64,            /* threads of a block, in all and in each dimension */
        [5] = 2147483647, 65535, 65535, 49152, /* blocks in each dimension; shared memory of a block */
        [10] = 32, [12] = 65536, 1980000,      /* threads of a warp; registers of a block; clock in kHz */
        [16] = 132, [36] = 2619000, 5120,      /* multiprocessors; clock and bus width of the memory */
        [38] = 52428800, 2048,                 /* second cache; threads of a multiprocessor */
        [81] = 233472, 65536, [97] = 232448,   /* shared memory and registers of one; the most for a block */
    };
    int capability = idle_gpu_setting("IDLE_GPU_CAPABILITY", 9);
    *value = attribute == 75 ? capability : values[attribute];
    if (attribute == 76 && capability == 7)
        *value = 5; /* torch has kernels for 7.5, but none for 7.0 */
    return 0;
}

int cuDeviceGet(int *device, int number) {
    *device = number;
    return 0;
}

int cuModuleLoadData(void **module, const void *image) {
    *module = &anything;
    return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = &anything;
    return 0;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : 0; /* threads of a block; no register is spilled */
    return 0;
}

/* Triton asks for an argument's address on the device. */
int cuPointerGetAttribute(void *value, int attribute, unsigned long address) {
    *(unsigned long *)value = address;
    return 0;
}

int cuCtxGetCurrent(void **context) {
    *context = &anything;
    return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    *is_active = 1;
    return 0;
}

SUCCEED cuCtxSetCurrent, cuFuncSetAttribute, cuFuncSetCacheConfig, cuLaunchKernel, cuLaunchKernelEx;

/* What torch and Triton look up before they use anything of the driver. */
SUCCEED cuCtxGetLimit, cuCtxSetLimit, cuDevicePrimaryCtxRetain, cuGetErrorString, cuLaunchCooperativeKernel;
SUCCEED cuLinkAddData_v2, cuLinkComplete, cuLinkCreate_v2, cuModuleLoad, cuModuleLoadDataEx, cuModuleUnload;
SUCCEED cuOccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxActiveClusters, cuTensorMapEncodeTiled;

static int refuse(void) {
    return 801;
}

/* A runtime asks for entries by name; of a driver that is too old it calls few. */
int cuGetProcAddress_v2(const char *name, void **entry, int version, unsigned long flags, int *found) {
    void *known = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
    *entry = known ? known : refuse;
    if (found)
        *found = 0;
    return 0;
}

int cuGetProcAddress(const char *name, void **entry, int version, unsigned long flags) {
    return cuGetProcAddress_v2(name, entry, version, flags, NULL);
}
