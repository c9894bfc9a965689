/* A library that is preloaded into a process. It records in $RECORD_TO what the process does to files below $RECORD_ROOT.

   An event: u32 kind, u32 length of the path, u64 offset, u64 length of the data, the path, the data. Numbers are
   little-endian. An event is written after its call succeeded, so what is recorded as synced was synced. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, OTHER };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int journal = -1;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static void put(const void *data, size_t length) {
    while (length > 0) {
        long done = syscall(SYS_write, journal, data, length);
        if (done <= 0) abort();
        data = (const char *)data + done;
        length -= (size_t)done;
    }
}

static int is_below(const char *path) {
    const char *root = getenv("RECORD_ROOT");
    size_t length = root ? strlen(root) : 0;
    return length > 0 && strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static void record(uint32_t kind, const char *path, uint64_t offset, const void *data, uint64_t length) {
    int saved = errno;
    uint32_t head[2] = {kind, (uint32_t)strlen(path)};
    uint64_t sizes[2] = {offset, length};
    pthread_mutex_lock(&lock);
    if (journal < 0) journal = (int)syscall(SYS_openat, AT_FDCWD, getenv("RECORD_TO"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    put(head, sizeof head);
    put(sizes, sizeof sizes);
    put(path, head[1]);
    put(data, length);
    pthread_mutex_unlock(&lock);
    errno = saved;
}

/* Write the path of an open file to `path`. Returns 0 if it isn't below the root. */
static int path_of(int fd, char *path) {
    char link[64];
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    errno = saved;
    if (length <= 0) return 0;
    path[length] = 0;
    return is_below(path);
}

/* Write the path of a name in an open folder to `path`. Returns 0 if it isn't below the root. */
static int path_at(int folder, const char *name, char *path) {
    if (name[0] == '/' || folder == AT_FDCWD) {
        snprintf(path, PATH_MAX, "%s", name); /* a relative name: the working directory is never below the root */
        return is_below(path);
    }
    if (!path_of(folder, path)) return 0;
    size_t length = strlen(path);
    snprintf(path + length, PATH_MAX - length, "/%s", name);
    return 1;
}

static int opened(int fd, int flags) {
    char path[PATH_MAX];
    if (fd >= 0 && (flags & O_CREAT) && path_of(fd, path)) {
        record(CREATE, path, 0, "", 0);
        if (flags & O_TRUNC) record(TRUNCATE, path, 0, "", 0);
    }
    return fd;
}

#define MODE(flags, last) \
    mode_t mode = 0; \
    if ((flags) & O_CREAT) { va_list more; va_start(more, last); mode = (mode_t)va_arg(more, int); va_end(more); }

int open(const char *name, int flags, ...) { REAL(open); MODE(flags, flags) return opened(real(name, flags, mode), flags); }
int open64(const char *name, int flags, ...) { REAL(open64); MODE(flags, flags) return opened(real(name, flags, mode), flags); }
int openat(int folder, const char *name, int flags, ...) { REAL(openat); MODE(flags, flags) return opened(real(folder, name, flags, mode), flags); }
int openat64(int folder, const char *name, int flags, ...) { REAL(openat64); MODE(flags, flags) return opened(real(folder, name, flags, mode), flags); }

static ssize_t wrote(int fd, const void *data, ssize_t done, off_t offset) {
    char path[PATH_MAX];
    if (done > 0 && path_of(fd, path)) record(WRITE, path, (uint64_t)offset, data, (uint64_t)done);
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { REAL(pwrite); return wrote(fd, data, real(fd, data, size, offset), offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { REAL(pwrite64); return wrote(fd, data, real(fd, data, size, offset), offset); }

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    ssize_t done = real(fd, data, size);
    int saved = errno;
    off_t end = done > 0 ? lseek(fd, 0, SEEK_CUR) : 0; /* the offset behind the written bytes, also with O_APPEND */
    errno = saved;
    return wrote(fd, data, done, end - done);
}

static ssize_t wrote_all(int fd, const struct iovec *parts, int number, off_t offset, ssize_t done) {
    ssize_t rest = done, size;
    for (int i = 0; i < number && rest > 0; i++, rest -= size, offset += size) {
        size = (ssize_t)parts[i].iov_len < rest ? (ssize_t)parts[i].iov_len : rest;
        wrote(fd, parts[i].iov_base, size, offset);
    }
    return done;
}

ssize_t pwritev(int fd, const struct iovec *parts, int number, off_t offset) { REAL(pwritev); return wrote_all(fd, parts, number, offset, real(fd, parts, number, offset)); }
ssize_t pwritev64(int fd, const struct iovec *parts, int number, off_t offset) { REAL(pwritev64); return wrote_all(fd, parts, number, offset, real(fd, parts, number, offset)); }
ssize_t pwritev2(int fd, const struct iovec *parts, int number, off_t offset, int flags) { REAL(pwritev2); return wrote_all(fd, parts, number, offset, real(fd, parts, number, offset, flags)); }
ssize_t pwritev64v2(int, const struct iovec *, int, off_t, int); /* some headers have it under this name only */
ssize_t pwritev64v2(int fd, const struct iovec *parts, int number, off_t offset, int flags) { REAL(pwritev64v2); return wrote_all(fd, parts, number, offset, real(fd, parts, number, offset, flags)); }

static int changed(uint32_t kind, int fd, off_t size, int result) {
    char path[PATH_MAX];
    if (result == 0 && path_of(fd, path)) record(kind, path, (uint64_t)size, "", 0);
    return result;
}

int ftruncate(int fd, off_t size) { REAL(ftruncate); return changed(TRUNCATE, fd, size, real(fd, size)); }
int ftruncate64(int fd, off_t size) { REAL(ftruncate64); return changed(TRUNCATE, fd, size, real(fd, size)); }
int fsync(int fd) { REAL(fsync); return changed(SYNC, fd, 0, real(fd)); }
int fdatasync(int fd) { REAL(fdatasync); return changed(SYNC, fd, 0, real(fd)); }
int fallocate(int fd, int mode, off_t offset, off_t size) { REAL(fallocate); return changed(OTHER, fd, 0, real(fd, mode, offset, size)); }
int posix_fallocate(int fd, off_t offset, off_t size) { REAL(posix_fallocate); return changed(OTHER, fd, 0, real(fd, offset, size)); }

static int renamed(int from_folder, const char *from, int to_folder, const char *to, int result) {
    char old[PATH_MAX], new[PATH_MAX];
    if (result == 0 && path_at(from_folder, from, old) && path_at(to_folder, to, new)) record(RENAME, old, 0, new, strlen(new));
    return result;
}

int rename(const char *from, const char *to) { REAL(rename); return renamed(AT_FDCWD, from, AT_FDCWD, to, real(from, to)); }
int renameat(int a, const char *from, int b, const char *to) { REAL(renameat); return renamed(a, from, b, to, real(a, from, b, to)); }

static int unlinked(int folder, const char *name, int result) {
    char path[PATH_MAX];
    if (result == 0 && path_at(folder, name, path)) record(UNLINK, path, 0, "", 0);
    return result;
}

int unlink(const char *name) { REAL(unlink); return unlinked(AT_FDCWD, name, real(name)); }
int unlinkat(int folder, const char *name, int flags) { REAL(unlinkat); return unlinked(folder, name, real(folder, name, flags)); }

static void *mapped(void *result, int protection, int flags, int fd) {
    if (result != MAP_FAILED && (flags & MAP_SHARED) && (protection & PROT_WRITE)) changed(OTHER, fd, 0, 0);
    return result;
}

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) { REAL(mmap); return mapped(real(at, size, protection, flags, fd, offset), protection, flags, fd); }
void *mmap64(void *at, size_t size, int protection, int flags, int fd, off_t offset) { REAL(mmap64); return mapped(real(at, size, protection, flags, fd, offset), protection, flags, fd); }
