// A stand-in for NVIDIA's run-time compiler: every kernel compiles to the same few bytes and is reported
// to use 77 registers.
//
// Built against the real nvrtc.h, so that every declaration here is NVIDIA's. Environment:
//   STAND_IN_FAIL  name of a function that fails, and its result: "nvrtcCompileProgram 6"

#include <nvrtc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char image[] = "\x7f" "ELF of a stand-in";
static char report[4096];

static nvrtcResult result_of(const char* name) {
  const char* fail = getenv("STAND_IN_FAIL");
  const size_t length = strlen(name);
  if (!fail || strncmp(fail, name, length) != 0 || fail[length] != ' ') return NVRTC_SUCCESS;
  return (nvrtcResult)atoi(fail + length);
}

const char* nvrtcGetErrorString(nvrtcResult result) {
  return result == NVRTC_ERROR_COMPILATION ? "NVRTC_ERROR_COMPILATION" : NULL;
}

nvrtcResult nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = 34;
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  *count = 2;
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetSupportedArchs(int* architectures) {
  architectures[0] = 90;  // unsorted on purpose
  architectures[1] = 80;
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcCreateProgram(
    nvrtcProgram* program, const char* source, const char* name, int count,
    const char* const* headers, const char* const* names) {
  (void)name, (void)headers;
  for (int i = 0; i < count; ++i) {
    if (!strstr(names[i], ".cuh")) return NVRTC_ERROR_INVALID_INPUT;
  }
  *program = (nvrtcProgram)strdup(source);
  return result_of("nvrtcCreateProgram");
}

nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* options) {
  const char* kernel = strstr((const char*)program, "rewrite_read_fwd(");
  if (count == 0 || strncmp(options[0], "--gpu-architecture=", 19) != 0) {
    return NVRTC_ERROR_INVALID_OPTION;
  }
  snprintf(report, sizeof report,
           "ptxas info    : Compiling entry function '%s' for 'sm_90'\n"
           "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
           "ptxas info    : Used 77 registers, used 1 barriers, 320 bytes smem\n",
           kernel ? "rewrite_read_fwd" : "unknown");
  return result_of("nvrtcCompileProgram");
}

nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t* bytes) {
  (void)program;
  *bytes = strlen(report) + 1;
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) {
  (void)program;
  strcpy(log, report);
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t* bytes) {
  (void)program;
  *bytes = sizeof image;
  return result_of("nvrtcGetCUBINSize");
}

nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* code) {
  (void)program;
  memcpy(code, image, sizeof image);
  return NVRTC_SUCCESS;
}

nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t* bytes) {
  return nvrtcGetCUBINSize(program, bytes);
}

nvrtcResult nvrtcGetPTX(nvrtcProgram program, char* code) { return nvrtcGetCUBIN(program, code); }

nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  free(*program);
  return NVRTC_SUCCESS;
}
