/* Files of choices (plugins/cuda/choice_file.h): what is stored is found again, also by other processes, and whatever is
 * in a file, whole records of it are found. */
#include "cuda/choice_file.h"
#include "forks.h"
#include "runner.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *path_of(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/some/where/%s", getenv("HOME"), name);
    return path;
}

static void put(struct choice_file *file, int key, int value)
{
    td__choice_file_put(file, &key, sizeof key, &value, sizeof value);
}

static int get(struct choice_file *file, int key)
{
    int value;
    return td__choice_file_get(file, &key, sizeof key, &value, sizeof value) ? value : -1;
}

static size_t record_of(uint8_t *record, int key, int value)
{
    return td__choice_format(record, &key, sizeof key, &value, sizeof value);
}

static void append(const char *path, const void *bytes, size_t size)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    CHECK(fd >= 0 && write(fd, bytes, size) == (ssize_t)size && !close(fd));
}

TEST(choices_are_found_again)
{
    const char *path = path_of("again");
    struct choice_file *file = td__choice_file_open(path);
    CHECK_EQ(get(file, 1), -1);
    put(file, 1, 10);
    put(file, 2, 20);
    put(file, 1, 11); /* the first one counts */
    CHECK_EQ(get(file, 1), 10);
    td__choice_file_close(file);
    file = td__choice_file_open(path);
    CHECK_EQ(get(file, 1), 10);
    CHECK_EQ(get(file, 2), 20);
    int key = 1;
    int64_t large;
    CHECK(!td__choice_file_get(file, &key, sizeof key, &large, sizeof large));
    CHECK(!td__choice_file_get(file, &key, 2, &large, sizeof(int)));
    td__choice_file_close(file);
    struct stat info;
    CHECK(!stat(path, &info) && info.st_size == 2 * (CHOICE_HEADER + 8) &&
          (info.st_mode & 0777) == 0600);
}

TEST(choices_without_a_file_stay_in_memory)
{
    struct choice_file *file = td__choice_file_open(NULL);
    td__choice_file_lock(file);
    put(file, 1, 10);
    td__choice_file_unlock(file);
    CHECK_EQ(get(file, 1), 10);
    td__choice_file_close(file);
}

TEST(choices_that_are_too_large_are_not_stored)
{
    static uint8_t key[CHOICE_MOST_KEY + 1], value[CHOICE_MOST_VALUE + 1];
    struct choice_file *file = td__choice_file_open(path_of("large"));
    td__choice_file_put(file, key, sizeof key, value, 1);
    td__choice_file_put(file, key, 1, value, sizeof value);
    CHECK(!td__choice_file_get(file, key, sizeof key, value, 1));
    td__choice_file_put(file, key, sizeof key - 1, value, sizeof value - 1);
    CHECK(td__choice_file_get(file, key, sizeof key - 1, value, sizeof value - 1));
    td__choice_file_close(file);
}

TEST(choices_torn_and_damaged_records_are_skipped)
{
    uint8_t record[CHOICE_MOST_RECORD];
    const char *path = path_of("torn");
    struct choice_file *file = td__choice_file_open(path);
    put(file, 1, 10);
    size_t size = record_of(record, 2, 20);
    for (size_t cut = 1; cut < size; cut++)
        append(path, record, cut);
    append(path, record, size);
    record_of(record, 3, 30);
    record[size - 1] ^= 1;
    append(path, record, size); /* wrong checksum */
    record_of(record, 4, 40);
    append(path, record, size);
    append(path, "TDc1\xff\xff\xff\xff________", CHOICE_HEADER); /* sizes out of bounds */
    append(path, record, size - 1);
    td__choice_file_close(file);
    file = td__choice_file_open(path);
    CHECK_EQ(get(file, 1), 10);
    CHECK_EQ(get(file, 2), 20);
    CHECK_EQ(get(file, 3), -1);
    CHECK_EQ(get(file, 4), 40);
    put(file, 3, 31); /* behind the torn record */
    td__choice_file_close(file);
    file = td__choice_file_open(path);
    CHECK_EQ(get(file, 3), 31);
    td__choice_file_close(file);
}

TEST(choices_of_a_hostile_file_end)
{
    uint8_t record[CHOICE_MOST_RECORD];
    const char *path = path_of("hostile");
    td__choice_file_close(td__choice_file_open(path));
    size_t size = record_of(record, 1, 10);
    append(path, record, size);
    record[size - 1] ^= 1;
    for (int i = 0; i < CHOICE_MOST_WRONG; i++)
        append(path, record, size);
    record_of(record, 2, 20);
    append(path, record, size);
    struct choice_file *file = td__choice_file_open(path);
    CHECK_EQ(get(file, 1), 10);
    CHECK_EQ(get(file, 2), -1);
    td__choice_file_lock(file);
    td__choice_file_unlock(file);
    CHECK_EQ(get(file, 2), -1);
    td__choice_file_close(file);
}

TEST(choices_of_a_full_file_are_kept_in_memory)
{
    const char *path = path_of("full");
    td__choice_file_close(td__choice_file_open(path));
    CHECK(!truncate(path, CHOICE_MOST_FILE));
    struct choice_file *file = td__choice_file_open(path);
    put(file, 1, 10);
    CHECK_EQ(get(file, 1), 10);
    td__choice_file_close(file);
    struct stat info;
    CHECK(!stat(path, &info) && info.st_size == CHOICE_MOST_FILE);
}

TEST(choices_refuse_what_is_not_a_plain_file)
{
    const char *path = path_of("link");
    td__choice_file_close(td__choice_file_open(path));
    CHECK(!unlink(path) && !symlink("/dev/null", path));
    struct choice_file *file = td__choice_file_open(path);
    put(file, 1, 10);
    CHECK_EQ(get(file, 1), 10);
    td__choice_file_close(file);
    CHECK(!unlink(path) && !mkfifo(path, 0600));
    file = td__choice_file_open(path);
    put(file, 1, 10);
    td__choice_file_close(file);
    file = td__choice_file_open("/proc/tandem/choices"); /* where nobody can write, root neither */
    put(file, 1, 10);
    CHECK_EQ(get(file, 1), 10);
    td__choice_file_close(file);
}

static void store_many(int rank, void *arg)
{
    struct choice_file *file = td__choice_file_open(arg);
    for (int i = 0; i < 500; i++) {
        put(file, i * 8 + rank, i); /* one's own */
        put(file, -1 - i, rank);    /* all have one */
    }
    td__choice_file_close(file);
}

TEST(choices_of_many_processes_are_all_there)
{
    const char *path = path_of("many");
    fork_ranks(4, store_many, (void *)path);
    struct choice_file *file = td__choice_file_open(path), *other = td__choice_file_open(path);
    for (int i = 0; i < 500; i++) {
        for (int rank = 0; rank < 4; rank++)
            CHECK_EQ(get(file, i * 8 + rank), i);
        CHECK_EQ(get(file, -1 - i), get(other, -1 - i));
    }
    td__choice_file_close(file);
    td__choice_file_close(other);
}

struct measured {
    const char *path;
    int *times;
};

static void measure_once(int rank, void *arg)
{
    struct measured *measured = arg;
    struct choice_file *file = td__choice_file_open(measured->path);
    td__choice_file_lock(file);
    if (get(file, 1) < 0) {
        __atomic_fetch_add(measured->times, 1, __ATOMIC_RELAXED);
        usleep(20000);
        put(file, 1, rank);
    }
    td__choice_file_unlock(file);
    td__choice_file_close(file);
}

TEST(choices_are_measured_by_one_process)
{
    struct measured measured = {path_of("lock"), fork_shared(sizeof(int))};
    fork_ranks(4, measure_once, &measured);
    CHECK_EQ(*measured.times, 1);
}

TEST(choices_wait_for_a_lock_no_longer_than_a_second_or_so)
{
    const char *path = path_of("held");
    struct choice_file *file = td__choice_file_open(path), *other = td__choice_file_open(path);
    td__choice_file_lock(file);
    put(file, 1, 10);
    td__choice_file_lock(other); /* goes on without the lock */
    CHECK_EQ(get(other, 1), 10);
    td__choice_file_unlock(other);
    td__choice_file_unlock(file);
    td__choice_file_close(file);
    td__choice_file_close(other);
}
