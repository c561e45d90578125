/* A file of choices; see choice_file.h. */
#include "cuda/choice_file.h"

#include <tandem/base.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { CHAINS = 256, LOCK_TRIES = 5000, LOCK_PAUSE_NS = 2000000 };

static const uint8_t magic[4] = {'T', 'D', 'c', '1'};

struct choice {
    struct choice *next;
    size_t key_size, value_size;
    uint8_t bytes[]; /* the key, then the value */
};

struct choice_file {
    pthread_mutex_t mutex; /* of all below */
    pthread_mutex_t
        turn;   /* held from lock to unlock: flock() does not exclude threads of one process */
    char *path; /* NULL: memory only */
    int fd;     /* -1: without the file */
    off_t seen; /* bytes of the file that were read */
    int wrong;  /* records with a wrong checksum so far */
    bool complained;
    struct choice *chains[CHAINS];
};

/* ---- Records ------------------------------------------------------------------------------------------------------ */

static uint64_t hash_bytes(uint64_t hash, const uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ bytes[i]) * UINT64_C(1099511628211);
    return hash;
}

/* Of the magic, the sizes, key and value. */
static uint64_t checksum(const uint8_t *record, size_t rest)
{
    uint64_t hash = hash_bytes(UINT64_C(14695981039346656037), record, 8);
    hash = hash_bytes(hash, record + CHOICE_HEADER, rest);
    return hash ^ hash >> 32;
}

size_t td__choice_format(uint8_t *record, const void *key, size_t key_size, const void *value,
                         size_t value_size)
{
    uint16_t sizes[2] = {(uint16_t)key_size, (uint16_t)value_size};
    memcpy(record, magic, sizeof magic);
    memcpy(record + sizeof magic, sizes, sizeof sizes);
    memcpy(record + CHOICE_HEADER, key, key_size);
    memcpy(record + CHOICE_HEADER + key_size, value, value_size);
    uint64_t sum = checksum(record, key_size + value_size);
    memcpy(record + 8, &sum, sizeof sum);
    return CHOICE_HEADER + key_size + value_size;
}

size_t td__choice_parse(const uint8_t *bytes, size_t size, int *wrong,
                        void (*found)(void *arg, const uint8_t *key, size_t key_size,
                                      const uint8_t *value, size_t value_size),
                        void *arg)
{
    size_t at = 0,
           incomplete = size; /* where the first record begins that goes on behind the end */
    while (at < size && *wrong < CHOICE_MOST_WRONG) {
        const uint8_t *record = bytes + at;
        size_t left = size - at;
        if (memcmp(record, magic, left < sizeof magic ? left : sizeof magic) != 0) {
            at++;
            continue;
        }
        uint16_t sizes[2];
        uint64_t sum;
        bool has_header = left >= CHOICE_HEADER;
        if (has_header) {
            memcpy(sizes, record + sizeof magic, sizeof sizes);
            memcpy(&sum, record + 8, sizeof sum);
        }
        size_t rest = has_header ? (size_t)sizes[0] + sizes[1] : 0;
        if (has_header && (sizes[0] > CHOICE_MOST_KEY || sizes[1] > CHOICE_MOST_VALUE)) {
            at++;
        } else if (!has_header || left - CHOICE_HEADER < rest) {
            incomplete = incomplete < at ? incomplete : at;
            at++;
        } else if (checksum(record, rest) != sum) {
            ++*wrong;
            at++;
        } else {
            found(arg, record + CHOICE_HEADER, sizes[0], record + CHOICE_HEADER + sizes[0],
                  sizes[1]);
            at += CHOICE_HEADER + rest;
            incomplete =
                size; /* what seemed incomplete before a whole record will not be completed */
        }
    }
    return incomplete;
}

/* ---- Memory ------------------------------------------------------------------------------------------------------- */

static struct choice **chain_of(struct choice_file *file, const uint8_t *key, size_t key_size)
{
    uint64_t hash = hash_bytes(UINT64_C(14695981039346656037), key, key_size);
    return &file->chains[(hash ^ hash >> 32) % CHAINS];
}

static struct choice *look_up(struct choice_file *file, const void *key, size_t key_size)
{
    struct choice *choice = *chain_of(file, key, key_size);
    while (choice && (choice->key_size != key_size || memcmp(choice->bytes, key, key_size) != 0))
        choice = choice->next;
    return choice;
}

static void remember(void *arg, const uint8_t *key, size_t key_size, const uint8_t *value,
                     size_t value_size)
{
    struct choice_file *file = arg;
    if (look_up(file, key, key_size))
        return;
    struct choice *choice = malloc(sizeof *choice + key_size + value_size);
    if (!choice)
        return; /* it is chosen once more */
    struct choice **chain = chain_of(file, key, key_size);
    choice->key_size = key_size;
    choice->value_size = value_size;
    memcpy(choice->bytes, key, key_size);
    memcpy(choice->bytes + key_size, value, value_size);
    choice->next = *chain;
    *chain = choice;
}

/* ---- The file ------------------------------------------------------------------------------------------------------ */

/* Once a file: the rest of the run does without it. */
static void complain(struct choice_file *file, const char *what, const char *why)
{
    if (!file->complained)
        td_log(
            TD_LOG_WARN,
            "cuda: %s %s: %s; measured choices are lost at the end of the run (TANDEM_CACHE_DIR names "
            "another directory, or none)",
            what, file->path, why);
    file->complained = true;
}

static void make_directories(const char *path)
{
    char *copy = strdup(path);
    for (char *slash = copy ? strchr(copy + 1, '/') : NULL; slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(copy, 0700); /* open() reports what is missing */
        *slash = '/';
    }
    free(copy);
}

/* Opens the file. In a directory that others may write to, it could be theirs: only a plain file of this user is used. */
static void open_file(struct choice_file *file, bool create)
{
    struct stat info;
    if (!file->path || file->fd >= 0 || file->complained)
        return;
    if (create)
        make_directories(file->path);
    int fd = open(file->path,
                  O_RDWR | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | (create ? O_CREAT : 0),
                  0600);
    if (fd < 0 && errno == ENOENT && !create)
        return;
    if (fd < 0) {
        complain(file, "cannot open", strerror(errno));
        return;
    }
    if (fstat(fd, &info) || !S_ISREG(info.st_mode) || info.st_uid != geteuid()) {
        complain(file, "does not use", "it is not a plain file of this user");
        close(fd);
        return;
    }
    file->fd = fd;
}

/* Reads what was appended since the last time. */
static void read_on(struct choice_file *file)
{
    struct stat info;
    if (file->fd < 0 || file->wrong >= CHOICE_MOST_WRONG || fstat(file->fd, &info))
        return;
    off_t end = info.st_size < CHOICE_MOST_FILE ? info.st_size : CHOICE_MOST_FILE;
    size_t size = end > file->seen ? (size_t)(end - file->seen) : 0, used = 0;
    uint8_t *bytes = size ? malloc(size) : NULL;
    while (bytes && used < size) {
        ssize_t count = pread(file->fd, bytes + used, size - used, file->seen + (off_t)used);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            break;
        used += (size_t)count;
    }
    if (used)
        file->seen += (off_t)td__choice_parse(bytes, used, &file->wrong, remember, file);
    if (file->wrong >= CHOICE_MOST_WRONG)
        complain(file, "does not read on", "it is damaged; remove it");
    free(bytes);
}

static void append(struct choice_file *file, const uint8_t *record, size_t size)
{
    struct stat info;
    open_file(file, true);
    if (file->fd < 0 || file->complained || fstat(file->fd, &info))
        return;
    if (info.st_size + (off_t)size > CHOICE_MOST_FILE) {
        complain(file, "does not append to", "it is as large as it may be; remove it");
        return;
    }
    ssize_t written;
    do
        written = write(file->fd, record, size);
    while (written < 0 && errno == EINTR);
    if (written != (ssize_t)size)
        complain(file, "cannot append to", written < 0 ? strerror(errno) : "the disk is full");
}

/* ---- Calls ---------------------------------------------------------------------------------------------------------- */

struct choice_file *td__choice_file_open(const char *path)
{
    struct choice_file *file = calloc(1, sizeof *file);
    char *copy = path ? strdup(path) : NULL;
    if (!file || (path && !copy)) {
        free(file);
        return NULL;
    }
    pthread_mutex_init(&file->mutex, NULL);
    pthread_mutex_init(&file->turn, NULL);
    file->fd = -1;
    file->path = copy;
    open_file(file, false);
    read_on(file);
    return file;
}

void td__choice_file_close(struct choice_file *file)
{
    if (!file)
        return;
    for (int i = 0; i < CHAINS; i++)
        for (struct choice *choice = file->chains[i], *next; choice; choice = next) {
            next = choice->next;
            free(choice);
        }
    if (file->fd >= 0)
        close(file->fd);
    pthread_mutex_destroy(&file->mutex);
    pthread_mutex_destroy(&file->turn);
    free(file->path);
    free(file);
}

bool td__choice_file_get(struct choice_file *file, const void *key, size_t key_size, void *value,
                         size_t value_size)
{
    pthread_mutex_lock(&file->mutex);
    const struct choice *choice = look_up(file, key, key_size);
    bool is_there = choice && choice->value_size == value_size;
    if (is_there)
        memcpy(value, choice->bytes + key_size, value_size);
    pthread_mutex_unlock(&file->mutex);
    return is_there;
}

void td__choice_file_put(struct choice_file *file, const void *key, size_t key_size,
                         const void *value, size_t value_size)
{
    uint8_t record[CHOICE_MOST_RECORD];
    if (key_size > CHOICE_MOST_KEY || value_size > CHOICE_MOST_VALUE)
        return;
    pthread_mutex_lock(&file->mutex);
    if (!look_up(file, key, key_size)) {
        remember(file, key, key_size, value, value_size);
        append(file, record, td__choice_format(record, key, key_size, value, value_size));
    }
    pthread_mutex_unlock(&file->mutex);
}

void td__choice_file_lock(struct choice_file *file)
{
    pthread_mutex_lock(&file->turn);
    pthread_mutex_lock(&file->mutex);
    open_file(file, true);
    int fd = file->fd;
    pthread_mutex_unlock(&file->mutex);
    if (fd < 0)
        return;
    for (int i = 0; i < LOCK_TRIES && flock(fd, LOCK_EX | LOCK_NB); i++)
        nanosleep(&(struct timespec){.tv_nsec = LOCK_PAUSE_NS}, NULL);
    pthread_mutex_lock(&file->mutex);
    read_on(file);
    pthread_mutex_unlock(&file->mutex);
}

void td__choice_file_unlock(struct choice_file *file)
{
    pthread_mutex_lock(&file->mutex);
    if (file->fd >= 0)
        flock(file->fd, LOCK_UN);
    pthread_mutex_unlock(&file->mutex);
    pthread_mutex_unlock(&file->turn);
}
