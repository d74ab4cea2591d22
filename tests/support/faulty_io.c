/* Stands between a program and the C library's file calls, to be loaded with LD_PRELOAD.

   Once armed for a folder it numbers every call that changes something below it, or makes such a change
   durable, writes each into a journal from which the folder can be built again (faulty_io.py), and at one
   of them lets the process die before the call, after it, or in the middle of a write, or refuses the call
   with an error number. What is below other folders is not touched. Linux on 64 bits only. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define PATH_SIZE 4096
enum how { COUNT, BEFORE, AFTER, HALF, REFUSE };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int armed, rank_number, journal = -1, record_data;
static char root[PATH_SIZE], only[PATH_SIZE];
static long next_call, target, times = 1;
static enum how how;
static int error_number;

void faulty_arm(const char *folder, const char *journal_file, int with_data, int rank, const char *only_these,
                long at, int how_, int error, long times_) {
    snprintf(root, sizeof root, "%s", folder);
    snprintf(only, sizeof only, "%s", only_these);
    journal = syscall(SYS_openat, AT_FDCWD, journal_file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    record_data = with_data, rank_number = rank, next_call = 0;
    target = at, how = how_, error_number = error, times = times_;
    armed = 1;
}

/* The path that a call means, absolute; empty where there is none. */
static void full_path(char *out, int folder, const char *path) {
    char link[64];
    ssize_t length;
    out[0] = 0;
    if (path && path[0] == '/') {
        snprintf(out, PATH_SIZE, "%s", path);
        return;
    }
    if (folder == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    length = readlink(link, out, PATH_SIZE - 1);
    out[length > 0 ? length : 0] = 0;
    if (path && length > 0)
        snprintf(out + length, PATH_SIZE - length, "/%s", path);
}

static int below(const char *path) {
    size_t length = strlen(root);
    return armed && !strncmp(path, root, length) && (path[length] == '/' || path[length] == 0);
}

/* Whether the call is one of those that are numbered: `only` is empty, or words "call:part of a path". */
static int selected(const char *call, const char *path) {
    char words[PATH_SIZE], *rest = NULL;
    if (!only[0])
        return 1;
    snprintf(words, sizeof words, "%s", only);
    for (char *word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char *part = strchr(word, ':');
        *part++ = 0;
        if ((!word[0] || !strcmp(word, call)) && strstr(path, part))
            return 1;
    }
    return 0;
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;)
        pause();
}

/* One line, then `size` bytes of data; one write, so that lines of several processes do not mix. */
static void note(const char *call, long number, const char *path, const char *other, long offset,
                 const void *data, long size, const char *outcome) {
    static __thread char line[3 * PATH_SIZE];
    long kept = record_data ? size : 0;
    int length = snprintf(line, sizeof line, "%d\t%ld\t%s\t%s\t%s\t%ld\t%ld\t%ld\t%s\n", rank_number, number, call,
                          path, other, offset, size, kept, outcome);
    struct iovec parts[2] = {{line, length}, {(void *)data, kept}};
    if (journal >= 0)
        syscall(SYS_writev, journal, parts, kept ? 2 : 1);
}

/* What is to happen at this call; numbers it. */
static enum how decide(const char *call, const char *path, long *number) {
    *number = -1;
    if (!selected(call, path))
        return COUNT;
    *number = next_call++;
    if (how == REFUSE)
        return *number >= target && (times < 0 || *number < target + times) ? REFUSE : COUNT;
    return *number == target ? how : COUNT;
}

/* Around a call that is made as `made`, a system call's expression; `data` may be half written. */
#define AROUND(call, path, other, offset, data, size, made, half)                                      \
    do {                                                                                               \
        long number_, result_;                                                                         \
        int error_;                                                                                    \
        pthread_mutex_lock(&lock);                                                                     \
        enum how now_ = decide(call, path, &number_);                                                  \
        if (now_ == REFUSE || now_ == BEFORE) {                                                        \
            note(call, number_, path, other, offset, NULL, 0, now_ == REFUSE ? "refused" : "before"); \
            if (now_ == BEFORE)                                                                        \
                die();                                                                                 \
            pthread_mutex_unlock(&lock);                                                               \
            errno = error_number;                                                                      \
            return -1;                                                                                 \
        }                                                                                              \
        if (now_ == HALF) {                                                                            \
            half;                                                                                      \
            note(call, number_, path, other, offset, NULL, 0, "half");                                 \
            die();                                                                                     \
        }                                                                                              \
        long offset_ = offset;                                                                         \
        result_ = made;                                                                                \
        error_ = errno;                                                                                \
        if (result_ >= 0)                                                                              \
            note(call, number_, path, other, offset_, data, size, now_ == AFTER ? "after" : "");        \
        else                                                                                           \
            note(call, number_, path, other, offset_, NULL, 0, "failed");                              \
        if (now_ == AFTER)                                                                             \
            die();                                                                                     \
        pthread_mutex_unlock(&lock);                                                                   \
        errno = error_;                                                                                \
        return result_;                                                                                \
    } while (0)

static int changed_open(int folder, const char *path, int flags, mode_t mode) {
    char full[PATH_SIZE];
    full_path(full, folder, path);
    if (!below(full) || !(flags & (O_CREAT | O_TRUNC)))
        return syscall(SYS_openat, folder, path, flags, mode);
    const char *call = faccessat(folder, path, F_OK, AT_SYMLINK_NOFOLLOW) ? "create" : "open";
    if (!strcmp(call, "open") && flags & O_TRUNC)
        call = "empty";
    if (!strcmp(call, "open")) /* changes nothing */
        return syscall(SYS_openat, folder, path, flags, mode);
    AROUND(call, full, "", 0, NULL, 0, syscall(SYS_openat, folder, path, flags, mode), ;);
}

#define MODE                                  \
    mode_t mode = 0;                          \
    if (flags & (O_CREAT | O_TMPFILE)) {      \
        va_list arguments;                    \
        va_start(arguments, flags);           \
        mode = va_arg(arguments, unsigned);   \
        va_end(arguments);                    \
    }
int open(const char *path, int flags, ...) { MODE return changed_open(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return changed_open(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return changed_open(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE return changed_open(folder, path, flags, mode); }
int creat(const char *path, mode_t mode) {
    return changed_open(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode);
}

/* Where a plain write goes. */
static long place(int file) {
    if (fcntl(file, F_GETFL) & O_APPEND) {
        struct stat status;
        return fstat(file, &status) ? -1 : status.st_size;
    }
    return lseek(file, 0, SEEK_CUR);
}

ssize_t write(int file, const void *data, size_t size) {
    char full[PATH_SIZE];
    if (armed)
        full_path(full, file, NULL);
    if (!armed || !below(full))
        return syscall(SYS_write, file, data, size);
    AROUND("write", full, "", place(file), data, result_, syscall(SYS_write, file, data, size),
           syscall(SYS_write, file, data, size / 2));
}

static ssize_t write_at(int file, const void *data, size_t size, off_t offset) {
    char full[PATH_SIZE];
    if (armed)
        full_path(full, file, NULL);
    if (!armed || !below(full))
        return syscall(SYS_pwrite64, file, data, size, offset);
    AROUND("write", full, "", offset, data, result_, syscall(SYS_pwrite64, file, data, size, offset),
           syscall(SYS_pwrite64, file, data, size / 2, offset));
}
ssize_t pwrite(int file, const void *data, size_t size, off_t at) { return write_at(file, data, size, at); }
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) { return write_at(file, data, size, at); }

ssize_t writev(int file, const struct iovec *parts, int count) {
    char full[PATH_SIZE];
    if (armed)
        full_path(full, file, NULL);
    if (!armed || !below(full))
        return syscall(SYS_writev, file, parts, count);
    return write(file, parts[0].iov_base, parts[0].iov_len); /* callers go on after a short write */
}

/* Copies within the kernel become writes: what callers do where it cannot. */
ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
    char full[PATH_SIZE], data[1 << 16];
    if (armed)
        full_path(full, to, NULL);
    if (!armed || !below(full))
        return syscall(SYS_sendfile, to, from, offset, size);
    size = size < sizeof data ? size : sizeof data;
    ssize_t count = offset ? pread(from, data, size, *offset) : read(from, data, size);
    if (count > 0)
        count = write(to, data, count);
    if (count > 0 && offset)
        *offset += count;
    return count;
}
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) { return sendfile(to, from, (off_t *)offset, size); }
ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size, unsigned flags) {
    char full[PATH_SIZE];
    if (armed)
        full_path(full, to, NULL);
    if (!armed || !below(full))
        return syscall(SYS_copy_file_range, from, from_at, to, to_at, size, flags);
    errno = EXDEV;
    return -1;
}

static int synced(const char *call, int file, long number) {
    char full[PATH_SIZE];
    if (armed)
        full_path(full, file, NULL);
    if (!armed || !below(full))
        return syscall(number, file);
    AROUND(call, full, "", 0, NULL, 0, syscall(number, file), ;);
}
int fsync(int file) { return synced("fsync", file, SYS_fsync); }
int fdatasync(int file) { return synced("fsync", file, SYS_fdatasync); }

static int renamed(int folder, const char *path, int other_folder, const char *other, unsigned flags) {
    char full[PATH_SIZE], full_other[PATH_SIZE];
    full_path(full, folder, path);
    full_path(full_other, other_folder, other);
    if (!below(full) && !below(full_other))
        return syscall(SYS_renameat2, folder, path, other_folder, other, flags);
    AROUND("rename", full, full_other, 0, NULL, 0, syscall(SYS_renameat2, folder, path, other_folder, other, flags), ;);
}
int rename(const char *path, const char *other) { return renamed(AT_FDCWD, path, AT_FDCWD, other, 0); }
int renameat(int folder, const char *path, int other_folder, const char *other) {
    return renamed(folder, path, other_folder, other, 0);
}
int renameat2(int folder, const char *path, int other_folder, const char *other, unsigned flags) {
    return renamed(folder, path, other_folder, other, flags);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    char full[PATH_SIZE];
    full_path(full, folder, path);
    if (!below(full))
        return syscall(SYS_mkdirat, folder, path, mode);
    AROUND("mkdir", full, "", 0, NULL, 0, syscall(SYS_mkdirat, folder, path, mode), ;);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int folder, const char *path, int flags) {
    char full[PATH_SIZE];
    full_path(full, folder, path);
    if (!below(full))
        return syscall(SYS_unlinkat, folder, path, flags);
    AROUND(flags & AT_REMOVEDIR ? "rmdir" : "unlink", full, "", 0, NULL, 0,
           syscall(SYS_unlinkat, folder, path, flags), ;);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

static int cut(int file, off_t size) {
    char full[PATH_SIZE];
    if (armed)
        full_path(full, file, NULL);
    if (!armed || !below(full))
        return syscall(SYS_ftruncate, file, size);
    AROUND("truncate", full, "", size, NULL, 0, syscall(SYS_ftruncate, file, size), ;);
}
int ftruncate(int file, off_t size) { return cut(file, size); }
int ftruncate64(int file, off64_t size) { return cut(file, size); }
