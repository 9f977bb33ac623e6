/* A disk that loses power: what was not synced is not there afterwards.
 *
 * Preloaded into a process, this keeps a copy in $DISK_KEPT of each file as it was when it was last synced,
 * and of each folder's names. A file is known by its inode and its time of birth, because inodes are used again.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int key(int folder, const char *name, char *out, size_t room) {
    struct statx found;
    if (statx(folder, name, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW, STATX_INO | STATX_BTIME, &found)) return -1;
    snprintf(out, room, "%llu-%lld-%u", (unsigned long long)found.stx_ino, (long long)found.stx_btime.tv_sec, found.stx_btime.tv_nsec);
    return 0;
}

static void keep(int handle) {
    const char *kept = getenv("DISK_KEPT");
    char own[96], path[4096], whole[4096], buffer[65536];
    struct stat found;
    if (!kept || fstat(handle, &found) || key(handle, "", own, sizeof own)) return;
    snprintf(whole, sizeof whole, "%s/%s", kept, own);
    snprintf(path, sizeof path, "%s/.%s", kept, own);
    FILE *copy = fopen(path, "w");
    if (!copy) return;
    if (S_ISDIR(found.st_mode)) {
        DIR *names = fdopendir(openat(handle, ".", O_RDONLY | O_DIRECTORY));
        for (struct dirent *entry; names && (entry = readdir(names));)
            if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") && !key(handle, entry->d_name, own, sizeof own))
                fprintf(copy, "%s %d %s\n", own, entry->d_type == DT_DIR, entry->d_name);
        if (names) closedir(names);
    } else {
        char name[64];
        snprintf(name, sizeof name, "/proc/self/fd/%d", handle);  /* it may have been opened for writing only */
        int file = open(name, O_RDONLY);
        for (ssize_t got; (got = read(file, buffer, sizeof buffer)) > 0;) fwrite(buffer, 1, (size_t)got, copy);
        close(file);
    }
    if (!fclose(copy)) rename(path, whole);  /* the process may be killed at any moment */
}

int fsync(int handle) {
    keep(handle);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(handle);
}

int fdatasync(int handle) {
    keep(handle);
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(handle);
}
