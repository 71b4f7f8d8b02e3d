// To be loaded before libc: a disk that takes half of a large write, and some time for that, so that a test can kill a
// process in the middle of a file. With -DVANISHING it also loses the directory of compiled kernels.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LARGE = 4096, MICROSECONDS = 20000 };

ssize_t write(int file, const void* data, size_t bytes) {
  static ssize_t (*write_to_disk)(int, const void*, size_t);
  if (!write_to_disk) *(void**)&write_to_disk = dlsym(RTLD_NEXT, "write");
  struct stat found;
  if (bytes < LARGE || fstat(file, &found) != 0 || !S_ISREG(found.st_mode)) return write_to_disk(file, data, bytes);
  const ssize_t written = write_to_disk(file, data, bytes / 2);
  usleep(MICROSECONDS);
  return written;
}

#ifdef VANISHING
// Deletes the cache of kernels as soon as it is made.
int mkdir(const char* path, mode_t mode) {
  int (*make)(const char*, mode_t);
  *(void**)&make = dlsym(RTLD_NEXT, "mkdir");
  const int made = make(path, mode);
  const char* cache = getenv("DDL_CACHE_DIR");
  if (cache && strcmp(path, cache) == 0) rmdir(path);
  return made;
}
#endif
