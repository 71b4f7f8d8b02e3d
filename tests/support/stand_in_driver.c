// A stand-in for NVIDIA's driver: it does no work, checks its arguments and logs its calls. As the real one does, it
// refuses code for another architecture, and a function that was loaded on another GPU.
//
// Built against the real cuda.h, so that every declaration here is NVIDIA's. Environment:
//   STAND_IN_LOG         file for the log; lines are appended
//   STAND_IN_DEVICES     number of GPUs (default 2)
//   STAND_IN_CAPABILITY  compute capability, 90 for 9.0 (default 90); "80 90" for GPUs of different types, in their
//                        order, the last one also for all that follow
//   STAND_IN_CLUSTER_LAUNCH  0 for a GPU that has no clusters
//   STAND_IN_CLUSTERS    clusters that fit on a GPU at once (default 20)
//   STAND_IN_OCCUPANCY   blocks of any kernel that a multiprocessor runs at once (default 32)
//   STAND_IN_BLOCKS      blocks that a multiprocessor can have (default 32)
//   STAND_IN_FAIL        name of a function that fails, and its result: "cuLaunchKernel 701"

#include <cuda.h>
#include <elf.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char contexts[16];  // their addresses are the handles; the primary contexts of 8 GPUs, then a green one of each
static __thread CUcontext stack[16];
static __thread int depth = 0;
static __thread CUstreamCaptureMode capture = CU_STREAM_CAPTURE_MODE_GLOBAL;

static int setting(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value ? atoi(value) : otherwise;
}

static int capability_of(CUdevice device) {
  const char* words = getenv("STAND_IN_CAPABILITY");
  int capability = 90;
  for (int i = 0; words && i <= device; ++i) {
    char* end;
    const long number = strtol(words, &end, 10);
    if (end == words) break;
    capability = (int)number, words = end;
  }
  return capability;
}

// Shared memory of a multiprocessor, in KiB; a block can have 1 KiB less.
static int shared_memory_of(CUdevice device) {
  const int capability = capability_of(device);
  return capability == 80 ? 164 : capability == 86 || capability == 89 ? 100 : 228;
}

static void log_line(const char* format, ...) {
  const char* path = getenv("STAND_IN_LOG");
  FILE* file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fputc('\n', file);
  fclose(file);
}

static CUresult result_of(const char* name) {
  const char* fail = getenv("STAND_IN_FAIL");
  const size_t length = strlen(name);
  if (!fail || strncmp(fail, name, length) != 0 || fail[length] != ' ') return CUDA_SUCCESS;
  return (CUresult)atoi(fail + length);
}

// The device whose context is current, or -1.
static int current_device(void) {
  return depth ? (int)((char*)stack[depth - 1] - contexts) : -1;
}

CUresult cuInit(unsigned int flags) {
  log_line("cuInit %u", flags);
  return result_of("cuInit");
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == 9999 ? NULL : "the driver's own words";
  return error == 9999 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = setting("STAND_IN_DEVICES", 2);
  return result_of("cuDeviceGetCount");
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return result_of("cuDeviceGet");
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  snprintf(name, length, "Stand-in %d", device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  const int capability = capability_of(device), shared = shared_memory_of(device) << 10;
  switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = shared - 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = shared; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = setting("STAND_IN_BLOCKS", 32); break;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: *value = setting("STAND_IN_CLUSTER_LAUNCH", 1); break;
    default: log_line("unexpected attribute %d", (int)attribute); return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  log_line("cuDevicePrimaryCtxRetain %d", device);
  *context = (CUcontext)&contexts[device];
  return result_of("cuDevicePrimaryCtxRetain");
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = depth ? stack[depth - 1] : NULL;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device() % 8;
  return depth ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  stack[depth++] = context;
  return result_of("cuCtxPushCurrent");
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  *context = stack[--depth];
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  const CUstreamCaptureMode before = capture;
  capture = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}

// A kernel's handle, which begins with its name.
typedef struct {
  char name[64];
  int device;  // on which its module was loaded
} Function;

// The architecture that code is for, 90 for sm_90; 0 for anything but code and PTX.
static int architecture_of(const void* image, int is_code) {
  if (is_code) {
    Elf64_Ehdr header;
    memcpy(&header, image, sizeof header);
    // The format of CUDA 13 has the number in the second byte of the flags.
    return header.e_ident[EI_ABIVERSION] >= 8 ? header.e_flags >> 8 & 0xff : header.e_flags & 0xff;
  }
  const char* target = strstr((const char*)image, ".target sm_");
  return target ? atoi(target + strlen(".target sm_")) : 0;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const int is_code = memcmp(image, ELFMAG, SELFMAG) == 0, device = current_device();
  const int architecture = architecture_of(image, is_code), capability = capability_of(device);
  log_line("cuModuleLoadData %s on %d, %s for sm_%d", is_code ? "code" : architecture ? "ptx" : "neither", device,
           capture == CU_STREAM_CAPTURE_MODE_RELAXED ? "relaxed" : "not relaxed", architecture);
  const int is_alike = is_code ? architecture / 10 == capability / 10 : architecture > 0;
  if (!is_alike || architecture > capability) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  *module = (CUmodule)&contexts[device];
  return result_of("cuModuleLoadData");
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  Function* loaded = calloc(1, sizeof *loaded);
  snprintf(loaded->name, sizeof loaded->name, "%s", name);
  loaded->device = (int)((char*)module - contexts);
  *function = (CUfunction)loaded;
  return result_of("cuModuleGetFunction");
}

static CUresult result_for(const char* name, CUfunction function) {
  return ((const Function*)function)->device == current_device() ? result_of(name) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  log_line("cuFuncSetAttribute %s %d=%d", (const char*)function, (int)attribute, value);
  return result_for("cuFuncSetAttribute", function);
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  log_line("cuFuncGetAttribute %s %d on %d%s", (const char*)function, (int)attribute, current_device(),
           capture == CU_STREAM_CAPTURE_MODE_RELAXED ? " relaxed" : "");
  *value = 64;
  return result_for("cuFuncGetAttribute", function);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction function, int threads, size_t shared) {
  log_line("cuOccupancyMaxActiveBlocksPerMultiprocessor %s on %d threads %d shared %zu%s", (const char*)function,
           current_device(), threads, shared, capture == CU_STREAM_CAPTURE_MODE_RELAXED ? " relaxed" : "");
  *count = setting("STAND_IN_OCCUPANCY", 32);
  return result_for("cuOccupancyMaxActiveBlocksPerMultiprocessor", function);
}

CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction function, const CUlaunchConfig* launch) {
  log_line("cuOccupancyMaxActiveClusters %s on %d grid %u %u %u block %u %u %u shared %u attributes %u%s",
           (const char*)function, current_device(), launch->gridDimX, launch->gridDimY, launch->gridDimZ,
           launch->blockDimX, launch->blockDimY, launch->blockDimZ, launch->sharedMemBytes, launch->numAttrs,
           capture == CU_STREAM_CAPTURE_MODE_RELAXED ? " relaxed" : "");
  *count = setting("STAND_IN_CLUSTERS", 20);
  return result_for("cuOccupancyMaxActiveClusters", function);
}

CUresult cuLaunchKernel(
    CUfunction function, unsigned int x, unsigned int y, unsigned int z, unsigned int threads_x,
    unsigned int threads_y, unsigned int threads_z, unsigned int shared, CUstream stream,
    void** parameters, void** extra) {
  log_line("cuLaunchKernel %s on %d grid %u %u %u block %u %u %u shared %u stream %llu first %llu%s%s",
           (const char*)function, current_device(), x, y, z, threads_x, threads_y, threads_z, shared,
           (unsigned long long)stream, *(unsigned long long*)parameters[0], extra ? " extra" : "",
           capture == CU_STREAM_CAPTURE_MODE_GLOBAL ? "" : " still relaxed");
  return result_for("cuLaunchKernel", function);
}

// Streams 4242 and 4343 belong to the primary contexts of GPU 0 and GPU 1, stream 4444 to a green context.
CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  const unsigned long long handle = (unsigned long long)stream;
  if (handle == 4444) return CUDA_ERROR_NOT_SUPPORTED;
  *context = (CUcontext)&contexts[handle == 4343];
  return CUDA_SUCCESS;
}

// NVRTC opens the driver, too, and asks for this.
CUresult cuGetExportTable(const void** table, const CUuuid* id) {
  (void)table, (void)id;
  return CUDA_ERROR_NOT_FOUND;
}

// For the tests: a context that another library might have left current, from 8 on a green one.
CUresult stand_in_make_current(int device) { return cuCtxPushCurrent((CUcontext)&contexts[device]); }
int stand_in_current(void) { return current_device(); }
