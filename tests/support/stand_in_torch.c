// A stand-in for libtorch_cpu: the shims of src/torch/shims.rs and dispatcher.rs, on tensors that are memory and nothing else.
//
//   -DTORCH=213  as torch 2.13 and newer: words of optionals are deleted by a shim, and failures keep a message
//   -DTORCH=210  as older ones: words are deleted by C++'s operator delete
//
// A copy always fails. So does a registration for the dispatch key in STAND_IN_REFUSES.

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  int64_t dim, sizes[4], strides[4];
  int32_t dtype;
  void* data;
} Tensor;

typedef void (*Kernel)(uint64_t*, uint64_t, uint64_t);

// What the tests read.
uint64_t stand_in_version;    // of the last registration
int64_t stand_in_words;       // made and not yet deleted
int64_t stand_in_tensors;     // the same
char stand_in_refusal[1000];  // the sentence of the last refused call

static const char* reason = "nothing has failed";
static int32_t failed(const char* why) { return reason = why, 1; }

static struct {
  const char* name;
  Kernel kernel;
} kernels[64];

Kernel stand_in_kernel(const char* name) {
  int at = 0;
  while (kernels[at].name && strcmp(kernels[at].name, name) != 0) ++at;
  return kernels[at].kernel;
}

int32_t aoti_torch_library_init_impl(
    const char* library, const char* key, const char* file, uint32_t line, void** made) {
  (void)library, (void)file, (void)line;
  *made = (void*)key;
  const char* refused = getenv("STAND_IN_REFUSES");
  return refused && strcmp(refused, key) == 0 ? failed("the stand-in has no such key\n") : 0;
}

int32_t torch_library_impl(void* key, const char* name, Kernel kernel, uint64_t version) {
  stand_in_version = version;
  if (strcmp(key, "CPU") != 0) return 0;
  int at = 0;
  while (kernels[at].name) ++at;
  kernels[at].name = strdup(name);
  kernels[at].kernel = kernel;
  return 0;
}

// torch's throws. The caller is ready for both.
void aoti_torch_check(bool holds, const char* function, const char* file, uint32_t line, const char* sentence) {
  (void)holds, (void)function, (void)file, (void)line;
  strncpy(stand_in_refusal, sentence, sizeof stand_in_refusal - 1);
}

int32_t torch_list_size(void* list, size_t* size) { return (void)list, (void)size, failed("no lists"); }
int32_t torch_list_get_item(void* list, size_t at, uint64_t* word) {
  return (void)list, (void)at, (void)word, failed("no lists");
}
int32_t torch_delete_list(void* list) { return (void)list, failed("no lists"); }

uint64_t* stand_in_new_word(void) { return ++stand_in_words, malloc(sizeof(uint64_t)); }
static void delete_word(void* word) { --stand_in_words, free(word); }
#if TORCH >= 213
int32_t torch_delete_stable_ivalue(uint64_t* word) { return delete_word(word), 0; }
const char* torch_exception_get_what_without_backtrace(void) { return reason; }
#else
void _ZdlPv(void* word) { delete_word(word); }
#endif

int32_t torch_get_num_threads(uint32_t* threads) { return *threads = 2, 0; }

bool aoti_torch_grad_mode_is_enabled(void) { return true; }

int32_t aoti_torch_is_defined(Tensor* tensor, bool* defined) { return *defined = tensor->data != NULL, 0; }
int32_t aoti_torch_get_data_ptr(Tensor* tensor, void** data) { return *data = tensor->data, 0; }
int32_t aoti_torch_get_dim(Tensor* tensor, int64_t* dim) { return *dim = tensor->dim, 0; }
int32_t aoti_torch_get_sizes(Tensor* tensor, int64_t** sizes) { return *sizes = tensor->sizes, 0; }
int32_t aoti_torch_get_strides(Tensor* tensor, int64_t** strides) { return *strides = tensor->strides, 0; }
int32_t aoti_torch_get_dtype(Tensor* tensor, int32_t* dtype) { return *dtype = tensor->dtype, 0; }
int32_t aoti_torch_get_device_type(Tensor* tensor, int32_t* type) { return (void)tensor, *type = 0, 0; }
int32_t aoti_torch_get_device_index(Tensor* tensor, int32_t* index) { return (void)tensor, *index = -1, 0; }

int32_t aoti_torch_new_uninitialized_tensor(Tensor** made) {
  return ++stand_in_tensors, *made = calloc(1, sizeof(Tensor)), 0;
}

int32_t aoti_torch_empty_strided(
    int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t type, int32_t index,
    Tensor** made) {
  (void)type, (void)index;
  Tensor* tensor = calloc(1, sizeof(Tensor));
  int64_t numbers = 1;
  for (int axis = 0; axis < dim; ++axis) {
    numbers *= tensor->sizes[axis] = sizes[axis];
    tensor->strides[axis] = strides[axis];
  }
  tensor->dim = dim;
  tensor->dtype = dtype;
  tensor->data = aligned_alloc(64, (numbers * 8 + 64) & ~63);
  memset(tensor->data, 0xff, numbers * 8);  // NaN
  return ++stand_in_tensors, *made = tensor, 0;
}

int32_t aoti_torch_create_tensor_from_blob(
    void* data, int64_t dim, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype, int32_t type,
    int32_t index, Tensor** made) {
  (void)data, (void)dim, (void)sizes, (void)strides, (void)offset, (void)dtype, (void)type, (void)index, (void)made;
  return failed("the stand-in views nothing");
}

int32_t aoti_torch_copy_(Tensor* to, Tensor* from, int32_t non_blocking) {
  return (void)to, (void)from, (void)non_blocking, failed("the stand-in copies nothing");
}

int32_t aoti_torch_delete_tensor_object(Tensor* tensor) {
  free(tensor->data);
  free(tensor);
  return --stand_in_tensors, 0;
}
