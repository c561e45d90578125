/* What only the file store does: its file, and what becomes of it when processes are killed, disks are full, or
 * another program writes to it. The rules of stores are in the suite for all of them. */
#include "runner.h"

#include "base/clock.h"
#include "store/file_log.h"

#include <tandem/store.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- Tools ------------------------------------------------------------------------------------ */

/* The path of a file in the directory of the test. */
static const char *in_directory(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", td_test_temp_dir(), name);
    return path;
}

static td_store *open_store(const char *path)
{
    td_store *store;
    CHECK_OK(td_file_store_open(path, &store));
    return store;
}

static void set(td_store *store, const char *key, const char *value)
{
    CHECK_OK(td_store_set(store, key, value, strlen(value)));
}

static void check_value(td_store *store, const char *key, const char *expected)
{
    td_bytes value;
    CHECK_OK(td_store_get(store, key, 10000, &value));
    CHECK_STR(value.data, expected);
    td_bytes_free(&value);
}

static int64_t count_keys(td_store *store)
{
    int64_t count;
    CHECK_OK(td_store_num_keys(store, &count));
    return count;
}

static bool exists(const char *path)
{
    return access(path, F_OK) == 0;
}

static int64_t size_of(const char *path)
{
    struct stat info;
    CHECK_EQ(stat(path, &info), 0);
    return info.st_size;
}

static void write_file(const char *path, const void *data, size_t size)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0);
    CHECK_EQ(write(fd, data, size), size);
    close(fd);
}

/* Starts fn(path) in a process of its own, which ends well when it returns. */
static pid_t start(void (*fn)(const char *), const char *path)
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        fn(path);
        _exit(0);
    }
    return pid;
}

static void end_by(pid_t pid, int signal)
{
    int status;
    if (signal)
        kill(pid, signal);
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(signal ? WTERMSIG(status) : status, signal);
}

/* ---- The life of the file ---------------------------------------------------------------------- */

TEST(last_to_close_removes_the_file)
{
    const char *path = in_directory("store");
    td_store *one = open_store(path), *two = open_store(path);
    set(one, "k", "v");
    check_value(two, "k", "v");
    struct stat info;
    CHECK_EQ(stat(path, &info), 0);
    CHECK_EQ(info.st_mode & 0777, 0600);
    CHECK_OK(td_store_close(one));
    CHECK(exists(path));
    check_value(two, "k", "v");
    one = open_store(path);
    check_value(one, "k", "v");
    CHECK_OK(td_store_close(two));
    CHECK_OK(td_store_close(one));
    CHECK(!exists(path));
}

TEST(relative_path_outlives_a_change_of_directory)
{
    CHECK_EQ(chdir(td_test_temp_dir()), 0);
    td_store *store = open_store("store");
    CHECK_EQ(chdir("/"), 0);
    CHECK(exists(in_directory("store")));
    CHECK_OK(td_store_close(store));
    CHECK(!exists(in_directory("store")));
}

static void set_and_stay(const char *path)
{
    td_store *store = open_store(path);
    set(store, "old", "value");
    for (;;)
        pause();
}

TEST(file_of_a_killed_job_is_emptied)
{
    const char *path = in_directory("store");
    pid_t pid = start(set_and_stay, path);
    CHECK_SOON(exists(path) && size_of(path) > 64);
    td_store *store = open_store(path);
    check_value(store, "old", "value"); /* it lives: we have joined it */
    CHECK_OK(td_store_close(store));
    end_by(pid, SIGKILL);
    CHECK(exists(path));
    store = open_store(path);
    CHECK_EQ(count_keys(store), 0);
    CHECK_OK(td_store_close(store));
    CHECK(!exists(path));
}

static int orphan_is_up[2]; /* the orphan writes a byte when it runs */
static int orphan_end[2];   /* and reads until the test closes its end */

static void leave_an_orphan(const char *path)
{
    td_store *store = open_store(path);
    set(store, "old", "value");
    char byte;
    if (fork() == 0) {
        close(orphan_end[1]);
        CHECK_EQ(write(orphan_is_up[1], "!", 1), 1);
        _exit((int)read(orphan_end[0], &byte, 1));
    }
    for (;;)
        pause();
}

TEST(orphaned_fork_does_not_keep_the_file_alive)
{
    const char *path = in_directory("store");
    char byte;
    CHECK_EQ(pipe(orphan_is_up) | pipe(orphan_end), 0);
    pid_t pid = start(leave_an_orphan, path);
    CHECK_EQ(read(orphan_is_up[0], &byte, 1), 1);
    end_by(pid, SIGKILL);
    td_store *store = open_store(path);
    CHECK_EQ(count_keys(store), 0);
    CHECK_OK(td_store_close(store));
    close(orphan_end[1]);
}

static void use_inherited(void *arg)
{
    td_store *store = arg;
    td_bytes value;
    CHECK_FAILS(td_store_set(store, "k", "child", 5), TD_ERR_STATE, "fork");
    CHECK_FAILS(td_store_get(store, "k", 1, &value), TD_ERR_STATE, "store");
    CHECK_OK(td_store_close(store));
    _exit(0);
}

TEST(child_of_a_fork_cannot_use_the_store)
{
    const char *path = in_directory("store");
    td_store *store = open_store(path);
    set(store, "k", "v");
    struct td_test_child child = td_test_fork(use_inherited, store);
    CHECK_STR(child.output, "");
    CHECK_EQ(child.status, 0);
    free(child.output);
    CHECK(exists(path));
    check_value(store, "k", "v");
    td_store *other = open_store(path); /* is not alone: the parent's locks have stayed */
    check_value(other, "k", "v");
    CHECK_OK(td_store_close(other));
    CHECK_OK(td_store_close(store));
    CHECK(!exists(path));
}

static void open_and_close(const char *path)
{
    for (int i = 0; i < 300; i++) {
        int64_t sum;
        td_store *store = open_store(path);
        CHECK_OK(td_store_add(store, "n", 1, &sum));
        CHECK(sum >= 1);
        CHECK_OK(td_store_close(store));
    }
}

TEST(opening_and_closing_at_once)
{
    const char *path = in_directory("store");
    pid_t pids[4];
    for (int i = 0; i < 4; i++)
        pids[i] = start(open_and_close, path);
    for (int i = 0; i < 4; i++)
        end_by(pids[i], 0);
    CHECK(!exists(path));
}

/* ---- What it cannot open ----------------------------------------------------------------------- */

TEST(foreign_file_is_refused_and_untouched)
{
    static const char *const texts[] = {"my thesis, the only copy\n", "TANDEM", "TANDEMF0........",
                                        "\n"};
    const char *path = in_directory("thesis.txt");
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        td_store *store = NULL;
        char content[64] = "";
        write_file(path, texts[i], strlen(texts[i]));
        CHECK_FAILS(td_file_store_open(path, &store), TD_ERR_INVALID, "not a store");
        CHECK_CONTAINS(td_last_error(), path);
        CHECK(store == NULL);
        FILE *file = fopen(path, "r");
        CHECK_EQ(fread(content, 1, sizeof content - 1, file), strlen(texts[i]));
        CHECK_STR(content, texts[i]);
        fclose(file);
    }
}

TEST(paths_that_cannot_be_opened)
{
    td_store *store = NULL;
    CHECK_FAILS(td_file_store_open(NULL, &store), TD_ERR_INVALID, "path");
    CHECK_FAILS(td_file_store_open("", &store), TD_ERR_INVALID, "path");
    CHECK_FAILS(td_file_store_open("/tmp/x", NULL), TD_ERR_INVALID, "output");
    CHECK_FAILS(td_file_store_open(td_test_temp_dir(), &store), TD_ERR_INVALID, "is a directory");
    CHECK_FAILS(td_file_store_open("/dev/null", &store), TD_ERR_INVALID, "not a regular file");
    CHECK_FAILS(td_file_store_open(in_directory("no/store"), &store), TD_ERR_SYSTEM,
                "no/store\": No such file or directory; the directory");
    CHECK_EQ(mkfifo(in_directory("fifo"), 0600), 0);
    CHECK_FAILS(td_file_store_open(in_directory("fifo"), &store), TD_ERR_INVALID, "not a regular");
    char long_name[300];
    memset(long_name, 'n', sizeof long_name);
    long_name[299] = '\0';
    CHECK_FAILS(td_file_store_open(in_directory(long_name), &store), TD_ERR_SYSTEM, "too long");
    CHECK(store == NULL);
}

TEST(no_permission)
{
    td_store *store = NULL;
    CHECK_EQ(mkdir(in_directory("locked"), 0500), 0);
    if (geteuid() == 0) {
        CHECK_EQ(chmod(td_test_temp_dir(), 0755), 0);
        CHECK_EQ(seteuid(65534), 0);
    }
    td_status status = td_file_store_open(in_directory("locked/store"), &store);
    int euid_error = seteuid(getuid());
    CHECK_EQ(euid_error, 0);
    CHECK_FAILS(status, TD_ERR_SYSTEM, "Permission denied");
}

/* ---- Many users at once ------------------------------------------------------------------------ */

static void add_500(const char *path)
{
    td_store *store = open_store(path);
    for (int i = 0; i < 500; i++)
        CHECK_OK(td_store_add(store, "sum", 1, NULL));
    CHECK_OK(td_store_close(store));
}

TEST(four_processes_add)
{
    const char *path = in_directory("store");
    td_store *store = open_store(path);
    pid_t pids[4];
    for (int i = 0; i < 4; i++)
        pids[i] = start(add_500, path);
    for (int i = 0; i < 4; i++)
        end_by(pids[i], 0);
    check_value(store, "sum", "2000");
    CHECK_OK(td_store_close(store));
}

static void *add_from_thread(void *store)
{
    for (int i = 0; i < 500; i++)
        CHECK_OK(td_store_add(store, "sum", 1, NULL));
    return NULL;
}

static void *wait_in_thread(void *store)
{
    CHECK_OK(td_store_wait(store, (const char *[]){"sum", "go"}, 2, 0));
    return NULL;
}

TEST(threads_share_a_store_beside_a_second_one)
{
    td_store *one = open_store(in_directory("store")), *two = open_store(in_directory("store"));
    pthread_t waiter, adders[4];
    CHECK_EQ(pthread_create(&waiter, NULL, wait_in_thread, one), 0);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&adders[i], NULL, add_from_thread, i % 2 ? one : two), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(adders[i], NULL);
    check_value(one, "sum", "2000");
    set(two, "go", "");
    pthread_join(waiter, NULL);
    CHECK_OK(td_store_close(one));
    CHECK_OK(td_store_close(two));
}

TEST(a_timeout_says_when_the_file_is_gone)
{
    td_bytes value;
    const char *path = in_directory("store");
    td_store *store = open_store(path);
    CHECK_FAILS(td_store_get(store, "late", 20, &value), TD_ERR_TIMEOUT, "\"late\" was not set");
    CHECK_EQ(unlink(path), 0);
    CHECK_FAILS(td_store_get(store, "late", 20, &value), TD_ERR_TIMEOUT, "was removed or replaced");
    write_file(path, "new", 3);
    CHECK_OK(td_store_close(store));
    CHECK_EQ(size_of(path), 3); /* another file: not ours to remove */
}

/* A stopped process: its lock stays. */
static int lock_first_byte(const char *path)
{
    int fd = open(path, O_RDWR);
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    CHECK(fd >= 0);
    CHECK_SOON(fcntl(fd, F_OFD_SETLK, &range) == 0);
    return fd;
}

static void *time_out(void *store)
{
    CHECK_FAILS(td_store_set(store, "k", "v", 1), TD_ERR_TIMEOUT, "stopped");
    return NULL;
}

TEST(stopped_process_is_a_timeout)
{
    const char *path = in_directory("store");
    td_store *store = open_store(path);
    td_bytes value;
    set(store, "k", "1");
    int fd = lock_first_byte(path);
    CHECK_OK(td_store_set_timeout(store, 50));
    CHECK_FAILS(td_store_set(store, "k", "2", 1), TD_ERR_TIMEOUT, path);
    CHECK_FAILS(td_store_get(store, "k", 20, &value), TD_ERR_TIMEOUT, "stopped");
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, time_out, store), 0);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    close(fd);
    check_value(store, "k", "1");
    fd = lock_first_byte(path);
    CHECK_FAILS(td_store_close(store), TD_ERR_TIMEOUT, path);
    close(fd);
    CHECK(exists(path)); /* for the next job to empty */
}

/* ---- Kills ------------------------------------------------------------------------------------- */

/* Round n: "a" and "b" hold the same bytes, as many as n says, each of them n; "n" is their count. */
static void write_rounds(const char *path)
{
    static char bytes[256 * 197];
    td_store *store = open_store(path);
    for (;;) {
        int64_t round;
        CHECK_OK(td_store_add(store, "n", 1, &round));
        memset(bytes, (int)(round & 255), sizeof bytes);
        td_bytes value = {.data = bytes, .size = (size_t)(1 + (round & 255) * 197)};
        CHECK_OK(
            td_store_multi_set(store, (const char *[]){"a", "b"}, (td_bytes[]){value, value}, 2));
    }
}

static void check_round(td_store *store, int64_t *last)
{
    td_bytes values[3];
    CHECK_OK(td_store_multi_get(store, (const char *[]){"a", "b", "n"}, 3, 0, values));
    int64_t round = atoll(values[2].data);
    CHECK(round >= *last);
    *last = round;
    int byte = (unsigned char)values[0].data[0];
    CHECK_EQ(values[0].size, 1 + byte * 197);
    CHECK_EQ(values[1].size, values[0].size);
    CHECK_MEM(values[0].data, values[1].data, values[0].size);
    CHECK_MEM(values[0].data, values[0].data + 1, values[0].size - 1); /* all the same */
    for (int i = 0; i < 3; i++)
        td_bytes_free(&values[i]);
}

TEST(killed_writers_leave_whole_values, .deadline_s = 60)
{
    const char *path = in_directory("store");
    td_store *store = open_store(path);
    int64_t last = 0;
    srand(1);
    for (int kills = 0; kills < 50; kills++) {
        pid_t pid = start(write_rounds, path);
        int64_t before = last;
        while (last == before)
            check_round(store, &last);
        for (int reads = rand() % 8; reads > 0; reads--)
            check_round(store, &last);
        end_by(pid, SIGKILL);
        check_round(store, &last);
        CHECK(size_of(path) < 8 << 20);
    }
    td_store *late = open_store(path);
    check_round(late, &last);
    CHECK_OK(td_store_close(late));
    CHECK_OK(td_store_close(store));
    CHECK(!exists(path));
}

/* ---- Size -------------------------------------------------------------------------------------- */

TEST(many_sets_of_a_key_keep_the_file_small, .deadline_s = 60)
{
    const char *path = in_directory("store");
    td_store *store = open_store(path), *reader = open_store(path);
    char text[100];
    set(store, "fixed", "stays");
    for (int i = 0; i < 100000; i++) {
        snprintf(text, sizeof text, "%090d", i);
        set(store, "k", text);
        if (i % 1000 == 0) {
            CHECK(size_of(path) < 5 << 19);
            check_value(i % 3000 ? store : reader, "k", text);
        }
    }
    check_value(reader, "k", text);
    check_value(reader, "fixed", "stays");
    td_store *late = open_store(path);
    check_value(late, "k", text);
    CHECK_EQ(count_keys(late), 2);
    CHECK_OK(td_store_close(late));
    CHECK_OK(td_store_close(reader));
    CHECK_OK(td_store_close(store));
}

TEST(large_values_come_and_go, .deadline_s = 60)
{
    enum { LARGE = 4 << 20 };
    const char *path = in_directory("store");
    td_store *store = open_store(path), *reader = open_store(path);
    char *bytes = malloc(LARGE);
    td_bytes value;
    for (int i = 0; i < 12; i++) {
        memset(bytes, i, LARGE);
        CHECK_OK(td_store_set(store, "large", bytes, LARGE - (size_t)i));
        CHECK_OK(td_store_append(store, "grows", bytes, 100000));
        CHECK(size_of(path) < (int64_t)7 * LARGE);
        if (i % 4)
            continue;
        CHECK_OK(td_store_get(reader, "large", 0, &value));
        CHECK_EQ(value.size, LARGE - i);
        CHECK_MEM(value.data, bytes, value.size);
        td_bytes_free(&value);
    }
    CHECK_OK(td_store_get(reader, "grows", 0, &value));
    CHECK_EQ(value.size, 1200000);
    CHECK_EQ(value.data[1199999], 11);
    td_bytes_free(&value);
    CHECK_OK(td_store_delete_key(store, "large", NULL));
    CHECK_OK(td_store_append(store, "grows", bytes, LARGE));
    CHECK_OK(td_store_delete_key(store, "grows", NULL));
    CHECK_EQ(count_keys(reader), 0);
    CHECK(size_of(path) < (int64_t)7 * LARGE);
    free(bytes);
    CHECK_OK(td_store_close(reader));
    CHECK_OK(td_store_close(store));
}

/* ---- A disk that is full, or cannot be written ------------------------------------------------- */

/* Fills the store until a call fails, and checks that everything before that is there, and that it works again
 * once there is space. */
static void fill_up(const char *path, const char *reason)
{
    static char bytes[10000];
    td_store *store = open_store(path), *reader = open_store(path);
    td_status status = TD_OK;
    int64_t count = 0;
    char key[32];
    for (; !status; count++) {
        snprintf(key, sizeof key, "%d", (int)count);
        memset(bytes, (int)count, sizeof bytes);
        status = td_store_set(store, key, bytes, sizeof bytes);
        CHECK(count < 1000);
    }
    count--;
    CHECK_FAILS(status, TD_ERR_SYSTEM, reason);
    CHECK_CONTAINS(td_last_error(), path);
    CHECK_EQ(count_keys(store), count);
    CHECK_EQ(count_keys(reader), count);
    td_bytes value;
    snprintf(key, sizeof key, "%d", (int)count - 1);
    memset(bytes, (int)count - 1, sizeof bytes);
    CHECK_OK(td_store_get(reader, key, 10000, &value));
    CHECK_MEM(value.data, bytes, sizeof bytes);
    td_bytes_free(&value);
    set(reader, "small", "fits"); /* the file was cut where the last whole record ends */
    check_value(store, "small", "fits");
    CHECK_OK(td_store_close(reader));
    CHECK_OK(td_store_close(store));
    CHECK(!exists(path));
}

/* Mounts an empty file system of 256 KiB on the test's directory, for this process only. */
static void mount_small(void)
{
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("small", td_test_temp_dir(), "tmpfs", 0, "size=256k,mode=0700"))
        td_test_skip("no permission to mount a file system (%s)", strerror(errno));
}

TEST(full_disk)
{
    mount_small();
    fill_up(in_directory("store"), "No space left on device; nothing was changed");

    /* A disk without room for the header: nothing stays behind. */
    int fd = open(in_directory("full"), O_WRONLY | O_CREAT, 0600);
    static char page[4096];
    while (write(fd, page, sizeof page) > 0)
        ;
    td_store *store = NULL;
    CHECK_FAILS(td_file_store_open(in_directory("store"), &store), TD_ERR_SYSTEM, "No space left");
    CHECK(!exists(in_directory("store")));
    close(fd);
}

TEST(read_only_disk)
{
    mount_small();
    td_store *store = NULL;
    CHECK_EQ(mount(NULL, td_test_temp_dir(), NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
    CHECK_FAILS(td_file_store_open(in_directory("store"), &store), TD_ERR_SYSTEM, "Read-only");
    CHECK_CONTAINS(td_last_error(), in_directory("store"));
}

TEST(limited_file_size)
{
    signal(SIGXFSZ, SIG_IGN);
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &(struct rlimit){.rlim_cur = 300000, .rlim_max = 300000}), 0);
    fill_up(in_directory("store"), "raise that with ulimit -f); nothing was changed");
}

/* ---- Damage ------------------------------------------------------------------------------------ */

/* Opens a damaged file a second time. It fails with a message, or finds all that was there. */
static void check_damage(const char *path, bool must_fail)
{
    td_store *store = NULL;
    td_status status = td_file_store_open(path, &store);
    if (status || must_fail) {
        CHECK_FAILS(status, TD_ERR_SYSTEM, "is damaged at byte");
        CHECK_CONTAINS(td_last_error(), path);
        return;
    }
    check_value(store, "a", "first");
    check_value(store, "b", "second, third");
    CHECK_OK(td_store_close(store));
}

static td_store *open_to_damage(const char *path, int *fd)
{
    td_store *store = open_store(path);
    set(store, "a", "first");
    set(store, "gone", "");
    set(store, "b", "second");
    CHECK_OK(td_store_append(store, "b", ", third", 7));
    CHECK_OK(td_store_delete_key(store, "gone", NULL));
    *fd = open(path, O_RDWR);
    CHECK(*fd >= 0);
    return store;
}

TEST(any_changed_byte_is_found)
{
    int fd;
    const char *path = in_directory("store");
    td_store *store = open_to_damage(path, &fd);
    int64_t size = size_of(path);
    for (int64_t at = 0; at < size; at++) {
        uint8_t was, is;
        CHECK_EQ(pread(fd, &was, 1, at), 1);
        for (int bit = 0; bit < 8; bit++) {
            is = was ^ (uint8_t)(1 << bit);
            CHECK_EQ(pwrite(fd, &is, 1, at), 1);
            check_damage(path, at < 44 || at >= 64); /* in between, the header has nothing */
        }
        CHECK_EQ(pwrite(fd, &was, 1, at), 1);
    }
    check_damage(path, false);
    close(fd);
    CHECK_OK(td_store_close(store));
}

TEST(truncated_and_random_files_are_errors)
{
    int fd;
    const char *path = in_directory("store");
    td_store *store = open_to_damage(path, &fd);
    srand(2);
    for (int64_t size = size_of(path) - 1; size >= 0; size--) {
        CHECK_EQ(ftruncate(fd, size), 0);
        check_damage(path, true);
    }
    for (int round = 0; round < 200; round++) {
        uint8_t bytes[500] = "TANDEMF1";
        for (size_t i = 8; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)rand();
        CHECK_EQ(pwrite(fd, bytes, sizeof bytes, 0), sizeof bytes);
        check_damage(path, true);
        CHECK_FAILS(td_store_set(store, "k", "v", 1), TD_ERR_SYSTEM, "damaged at byte 0");
    }
    close(fd);
    CHECK_OK(td_store_close(store));
    CHECK(!exists(path));
}

/* Hostile records whose checksums are right. */
TEST(malformed_records_are_errors)
{
    static const struct {
        int change;
        size_t key_size;
        int64_t cut; /* how far the header's end is moved */
    } cases[] = {{0, 1, 0}, {4, 1, 0}, {TD__FILE_SET, 5000, 0}, {TD__FILE_SET, 1, -1}};
    static char bytes[5000];
    const char *path = in_directory("log");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td__buffer records = {0};
        struct td__file_log writer = {.fd = open(path, O_RDWR | O_CREAT, 0600), .path = path};
        struct td__file_log reader = {.fd = writer.fd, .path = path};
        CHECK_OK(td__file_log_reset(&writer));
        td__file_log_put(&writer, &records, (enum td__file_change)cases[i].change,
                         (struct td__span){bytes, cases[i].key_size}, (struct td__span){"v", 1});
        records.size += (size_t)cases[i].cut;
        CHECK_OK(td__file_log_commit(&writer, &records));
        CHECK_FAILS(td__file_log_refresh(&reader), TD_ERR_SYSTEM, "is damaged at byte 64");
        close(writer.fd);
    }
}

TEST(another_job_in_the_same_file_is_noticed)
{
    const char *path = in_directory("store");
    td_store *store = open_store(path);
    set(store, "k", "v");
    struct td__file_log intruder = {.fd = open(path, O_RDWR), .path = path};
    CHECK_OK(td__file_log_reset(&intruder)); /* as if the locks were lost */
    CHECK_FAILS(td_store_set(store, "k", "w", 1), TD_ERR_STATE, "another job has emptied the file");
    close(intruder.fd);
    CHECK_OK(td_store_close(store));
}
