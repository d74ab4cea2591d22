/* A CUDA runtime and cuBLAS whose device memory is host memory and whose kernels do nothing.

   Loaded before torch, it takes these calls from the libraries that come with torch, which keep the others,
   such as the registration of kernels. All work is done when it is asked for: streams are empty, and events
   have happened. */

#include "idle_gpu.h"
#include <driver_types.h>
#include <pthread.h>
#include <sys/mman.h>

static _Thread_local int last_error;
static _Thread_local int current_device;

static int failed(int error) {
    last_error = error;
    return error;
}

int cudaPeekAtLastError(void) {
    return last_error;
}

int cudaGetLastError(void) {
    int error = last_error;
    last_error = 0;
    return error;
}

/* Devices */

int cudaGetDeviceCount(int *count) {
    *count = idle_gpu_count();
    return *count ? 0 : failed(cudaErrorNoDevice);
}

int cudaGetDevice(int *device) {
    *device = current_device;
    return 0;
}

int cudaSetDevice(int device) {
    if (device >= idle_gpu_count())
        return failed(cudaErrorInvalidDevice);
    current_device = device;
    return 0;
}

int cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    return cuDeviceGetAttribute(value, attribute, device);
}

static size_t total_memory(void) {
    return (size_t)idle_gpu_setting("IDLE_GPU_GIB", 80) << 30;
}

int cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "idle GPU");
    found->totalGlobalMem = total_memory();
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = 232448;
    found->sharedMemPerMultiprocessor = 233472;
    cuDeviceGetAttribute(&found->major, cudaDevAttrComputeCapabilityMajor, device);
    cuDeviceGetAttribute(&found->minor, cudaDevAttrComputeCapabilityMinor, device);
    cuDeviceGetAttribute(&found->multiProcessorCount, cudaDevAttrMultiProcessorCount, device);
    cuDeviceGetAttribute(&found->warpSize, cudaDevAttrWarpSize, device);
    cuDeviceGetAttribute(&found->maxThreadsPerBlock, cudaDevAttrMaxThreadsPerBlock, device);
    cuDeviceGetAttribute(&found->maxThreadsPerMultiProcessor, cudaDevAttrMaxThreadsPerMultiProcessor, device);
    cuDeviceGetAttribute(&found->regsPerMultiprocessor, cudaDevAttrMaxRegistersPerMultiprocessor, device);
    cuDeviceGetAttribute(&found->l2CacheSize, cudaDevAttrL2CacheSize, device);
    for (int i = 0; i < 3; i++) {
        cuDeviceGetAttribute(&found->maxThreadsDim[i], cudaDevAttrMaxBlockDimX + i, device);
        cuDeviceGetAttribute(&found->maxGridSize[i], cudaDevAttrMaxGridDimX + i, device);
    }
    return 0;
}

/* Memory: zeros at first; the host lends a page when it is written */

#define MOST_BLOCKS 65536
static struct block {
    char *start;
    size_t size;
} blocks[MOST_BLOCKS];
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The block that holds an address, a free one for NULL; NULL if there is none. */
static struct block *block_of(const char *address) {
    for (struct block *block = blocks; block < blocks + MOST_BLOCKS; block++)
        if (address ? block->start <= address && address < block->start + block->size : !block->start)
            return block;
    return NULL;
}

int cudaMemGetInfo(size_t *free, size_t *total) {
    *total = total_memory();
    *free = *total - used - ((size_t)idle_gpu_setting("IDLE_GPU_TAKEN_MIB", 0) << 20);
    return 0;
}

int cudaMalloc(void **address, size_t size) {
    size_t free, total;
    size = (size + 4095) & ~4095ul;
    pthread_mutex_lock(&lock);
    cudaMemGetInfo(&free, &total);
    struct block *block = size <= free ? block_of(NULL) : NULL;
    if (block) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        *address = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
        *block = (struct block){*address, size};
        used += size;
    }
    pthread_mutex_unlock(&lock);
    return block ? 0 : failed(cudaErrorMemoryAllocation);
}

int cudaFree(void *address) {
    pthread_mutex_lock(&lock);
    struct block *block = address ? block_of(address) : NULL;
    if (block) {
        munmap(address, block->size);
        used -= block->size;
        *block = (struct block){NULL, 0};
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

int cudaPointerGetAttributes(struct cudaPointerAttributes *found, void *address) {
    int is_on_device = address && block_of(address);
    memset(found, 0, sizeof *found);
    found->device = current_device;
    found->type = is_on_device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
    found->devicePointer = is_on_device ? address : NULL;
    return 0;
}

int cudaHostAlloc(void **address, size_t size, unsigned flags) {
    return posix_memalign(address, 4096, size) ? failed(cudaErrorMemoryAllocation) : 0;
}

int cudaFreeHost(void *address) {
    free(address);
    return 0;
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    memmove(to, from, size);
    return 0;
}

SUCCEED cudaHostRegister, cudaHostUnregister, cudaMemsetAsync;

/* Streams and events */

static int give_handle(void **handle) {
    static long last = 4096;
    *handle = (void *)__atomic_add_fetch(&last, 16, __ATOMIC_RELAXED);
    return 0;
}

#define GIVE_HANDLE extern __attribute__((alias("give_handle"))) __typeof__(give_handle)
GIVE_HANDLE cudaStreamCreateWithPriority, cudaEventCreate, cudaEventCreateWithFlags, cublasCreate_v2;

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return 0;
}

int cudaStreamIsCapturing(void *stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return 0;
}

int cudaEventElapsedTime(float *milliseconds, void *from, void *to) {
    *milliseconds = 1;
    return 0;
}

SUCCEED cudaStreamQuery, cudaStreamSynchronize, cudaStreamWaitEvent, cudaThreadExchangeStreamCaptureMode;
SUCCEED cudaEventDestroy, cudaEventRecord, cudaEventRecordWithFlags, cudaEventQuery, cudaEventSynchronize;
SUCCEED cudaDeviceSynchronize;

/* Kernels */

int __cudaGetKernel(const void **kernel, const void *function) {
    *kernel = function;
    return 0;
}

int cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->binaryVersion = 90;
    found->ptxVersion = 90;
    return 0;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) {
    *blocks = 2;
    return 0;
}

int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

int cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version, unsigned long flags,
                                     int *found) {
    return cuGetProcAddress_v2(name, entry, version, flags, found);
}

/* Of a cuDNN without attention, so that torch takes its own kernels. */
size_t cudnnGetVersion(void) {
    return 8905;
}

SUCCEED cudaFuncSetAttribute, __cudaLaunchKernel, cudaLaunchKernelExC;
SUCCEED cublasDestroy_v2, cublasSetStream_v2, cublasSetWorkspace_v2, cublasSetMathMode;
SUCCEED cublasGemmEx, cublasGemmStridedBatchedEx, cublasSgemm_v2, cublasSgemmStridedBatched, cublasDgemm_v2;
