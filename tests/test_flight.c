/* The pages of the flight recorder: entries, names, times, owners of slots, and reading what was torn or made up. */
#include "runner.h"

#include "os/flight_read.h"
#include "os/flight.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct td__flight_page page;

static struct td__flight_log *open_log(void)
{
    struct td__flight_log *log;
    unsetenv("TANDEM_FLIGHT");
    CHECK_OK(td__flight_open(1, 4, &log));
    return log;
}

static const struct td__flight_page *read_page(const struct td__flight_log *log)
{
    struct td__flight_now now;
    td__flight_now(&now);
    td__flight_log_read(log, &now, &page);
    return &page;
}

static uint64_t begin(struct td__flight_log *log, uint64_t sequence, enum td__flight_state state)
{
    unsigned flags = state == TD__FLIGHT_RUNNING ? TD__FLIGHT_AT_ONCE : TD__FLIGHT_POSTED;
    return td__flight_begin(log, sequence, 10 * sequence,
                            td__flight_what(TD__FLIGHT_ALL_REDUCE, TD_F32, 0, flags, -1), 0, state);
}

static const char *describe(const struct td__flight_call *call)
{
    static char text[TD__FLIGHT_TEXT];
    td__flight_describe(call, text);
    return text;
}

/* ---- Entries --------------------------------------------------------------------------------- */

TEST(an_operation_is_read_back)
{
    struct td__flight_log *log = open_log();
    CHECK_EQ(td__flight_name_group(log, 77, "world"), 0);
    td__flight_set_label("bucket 3");
    uint64_t entry = begin(log, 17, TD__FLIGHT_RUNNING);
    td__flight_set_label(NULL);
    td__flight_set_phase(log, TD__FLIGHT_JOINED);
    read_page(log);
    CHECK_EQ(page.count, 1);
    CHECK_EQ(page.rank, 1);
    CHECK_EQ(page.size, 4);
    CHECK_EQ(page.pid, getpid());
    CHECK_EQ(page.phase, TD__FLIGHT_JOINED);
    CHECK_EQ(page.calls[0].state, TD__FLIGHT_RUNNING);
    CHECK_EQ(page.keys[0], 77);
    CHECK_STR(page.groups[0], "world");
    CHECK_STR(page.calls[0].label, "bucket 3");
    CHECK_STR(describe(&page.calls[0]), "all_reduce #17 of 170 f32");
    CHECK(page.calls[0].started_ns == page.calls[0].queued_ns && !page.calls[0].ended_ns);

    td__flight_end(log, entry, true);
    begin(log, 18, TD__FLIGHT_RUNNING);
    read_page(log);
    CHECK_EQ(page.count, 2);
    CHECK_EQ(page.calls[0].state, TD__FLIGHT_DONE);
    CHECK(page.calls[0].ended_ns >= page.calls[0].started_ns);
    CHECK_STR(page.calls[1].label, "");
    td__flight_close(log);
}

TEST(times_are_those_of_the_wall_clock)
{
    struct td__flight_log *log = open_log();
    struct timespec before, after;
    clock_gettime(CLOCK_REALTIME, &before);
    uint64_t entry = begin(log, 1, TD__FLIGHT_QUEUED);
    td__sleep_ns(30000000);
    td__flight_run(log, entry);
    td__sleep_ns(20000000);
    td__flight_end(log, entry, false);
    clock_gettime(CLOCK_REALTIME, &after);
    read_page(log);
    const struct td__flight_call *call = &page.calls[0];
    int64_t first = (int64_t)before.tv_sec * 1000000000 + before.tv_nsec;
    int64_t last = (int64_t)after.tv_sec * 1000000000 + after.tv_nsec;
    enum { SLACK = 5000000 };
    CHECK_EQ(call->state, TD__FLIGHT_FAILED);
    CHECK(call->queued_ns > first - SLACK && call->ended_ns < last + SLACK);
    CHECK(call->started_ns - call->queued_ns > 29000000);
    CHECK(call->ended_ns - call->started_ns > 19000000);
    td__flight_close(log);
}

TEST(the_last_256_are_kept)
{
    struct td__flight_log *log = open_log();
    for (uint64_t i = 1; i <= 1000; i++)
        td__flight_end(log, begin(log, i, TD__FLIGHT_RUNNING), true);
    read_page(log);
    CHECK_EQ(page.count, 256);
    CHECK_EQ(page.total, 1000);
    for (int i = 0; i < 256; i++)
        CHECK_EQ(page.calls[i].sequence, 745 + i);
    td__flight_close(log);
}

enum { EACH = 20000 };

static void *write_many(void *log)
{
    for (uint64_t i = 1; i <= EACH; i++)
        td__flight_end(log, begin(log, i, TD__FLIGHT_RUNNING), true);
    return NULL;
}

/* The first thread counts alone until another one starts, at any moment. */
TEST(threads_share_the_numbers)
{
    for (int attempt = 0; attempt < 20; attempt++) {
        struct td__flight_log *log = open_log();
        pthread_t others[2];
        uint64_t before = 100 * (uint64_t)attempt;
        for (uint64_t i = 1; i <= before; i++)
            td__flight_end(log, begin(log, i, TD__FLIGHT_RUNNING), true);
        for (int i = 0; i < 2; i++)
            CHECK_EQ(pthread_create(&others[i], NULL, write_many, log), 0);
        write_many(log);
        for (int i = 0; i < 2; i++)
            pthread_join(others[i], NULL);
        read_page(log);
        CHECK_EQ(page.total, before + 3 * EACH);
        CHECK_EQ(page.count, 256);
        td__flight_close(log);
    }
}

/* What a rank is stuck in must not be overwritten by what its other threads do. */
TEST(operations_under_way_are_kept)
{
    struct td__flight_log *log = open_log();
    uint64_t stuck = begin(log, 5, TD__FLIGHT_RUNNING);
    uint64_t posted = begin(log, 6, TD__FLIGHT_QUEUED);
    for (uint64_t i = 100; i < 2000; i++)
        td__flight_end(log, begin(log, i, TD__FLIGHT_RUNNING), true);
    read_page(log);
    CHECK_EQ(page.total, 1902);
    CHECK_EQ(page.calls[0].sequence, 5);
    CHECK_EQ(page.calls[1].sequence, 6);
    CHECK(!page.calls[1].waited);
    td__flight_wait(log, posted);
    read_page(log);
    CHECK(page.calls[1].waited && !page.calls[0].waited);
    td__flight_end(log, stuck, true);
    td__flight_end(log, posted, true);
    for (uint64_t i = 0; i < 300; i++)
        td__flight_end(log, begin(log, 5000 + i, TD__FLIGHT_RUNNING), true);
    read_page(log);
    CHECK(page.calls[0].sequence >= 5000);
    td__flight_end(log, stuck, false); /* which is another's by now */
    CHECK_EQ(read_page(log)->calls[0].state, TD__FLIGHT_DONE);
    td__flight_close(log);
}

TEST(many_unfinished_operations_end_the_search)
{
    struct td__flight_log *log = open_log();
    for (uint64_t i = 1; i <= 2000; i++)
        begin(log, i, TD__FLIGHT_QUEUED);
    CHECK_EQ(read_page(log)->count, 256);
    td__flight_close(log);
}

/* ---- Texts ----------------------------------------------------------------------------------- */

TEST(names_of_groups_are_reused)
{
    struct td__flight_log *log = open_log();
    char name[32];
    for (int i = 0; i < 40; i++) {
        snprintf(name, sizeof name, "group %d", i);
        CHECK_EQ(td__flight_name_group(log, 1000u + (unsigned)i, name), i < 31 ? i : 31);
    }
    read_page(log);
    CHECK_STR(page.groups[30], "group 30");
    CHECK_STR(page.groups[31], "…");
    begin(log, 1, TD__FLIGHT_RUNNING); /* of group 0 */
    td__flight_forget_group(log, 0);
    CHECK_STR(read_page(log)->groups[0], "group 0");
    CHECK_EQ(td__flight_name_group(log, 5000, "new"), 0);
    read_page(log);
    CHECK_STR(page.groups[0], "new");
    CHECK_EQ(page.calls[0].group, 31);
    CHECK_EQ(page.calls[0].rank, -1);
    td__flight_forget_group(log, 31);
    CHECK_STR(read_page(log)->groups[31], "…");
    td__flight_close(log);
}

TEST(texts_are_cut_between_characters)
{
    char out[8];
    td__flight_cut("abcdefghij", out, sizeof out);
    CHECK_STR(out, "abcdefg");
    td__flight_cut("abcdeféé", out, sizeof out); /* the é would end behind the last byte */
    CHECK_STR(out, "abcdef");
    td__flight_cut("äöü", out, sizeof out);
    CHECK_STR(out, "äöü");
}

TEST(control_characters_are_not_shown)
{
    char out[64];
    td__flight_printable("a\033[2Jb\ac\x7f", 9, out);
    CHECK_STR(out, "a?[2Jb?c?");
    td__flight_printable("\xc2\x9b\xe2\x80\xae \xff \xc3", 9, out);
    CHECK_STR(out, "?? ? ?");
    td__flight_printable("größer … ok", 15, out);
    CHECK_STR(out, "größer … ok");
}

TEST(the_last_failure_is_kept)
{
    struct td__flight_log *log = open_log();
    char sentence[700];
    memset(sentence, 'x', sizeof sentence - 1);
    sentence[sizeof sentence - 1] = 0;
    td__flight_fail(log, 3, TD_ERR_TIMEOUT, sentence);
    read_page(log);
    CHECK_EQ(page.failure, TD_ERR_TIMEOUT);
    CHECK_EQ(page.failure_number, 3);
    CHECK_EQ(strlen(page.sentence), 511);
    CHECK(page.failure_ns != 0);
    td__flight_close(log);
}

/* ---- Several threads ------------------------------------------------------------------------- */

struct writers {
    struct td__flight_log *log;
    _Atomic bool stop;
};

/* Each entry's count is ten times its sequence: a mixture of two would not be so. */
static void *write_on(void *arg)
{
    struct writers *writers = arg;
    uint64_t at = 1;
    while (!writers->stop) {
        td__flight_set_label(at & 1 ? "odd" : "even");
        td__flight_end(writers->log, begin(writers->log, at, TD__FLIGHT_RUNNING), true);
        at++;
    }
    return NULL;
}

TEST(readers_see_no_mixtures)
{
    struct writers writers = {.log = open_log()};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, write_on, &writers), 0);
    int seen = 0;
    for (int attempt = 0; attempt < 300 || !seen; attempt++) {
        read_page(writers.log);
        for (int i = 0; i < page.count; i++) {
            const struct td__flight_call *call = &page.calls[i];
            CHECK_EQ(call->count, 10 * call->sequence);
            CHECK_STR(call->label, call->sequence & 1 ? "odd" : "even");
            seen++;
        }
    }
    writers.stop = true;
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    CHECK(seen > 0);
    td__flight_close(writers.log);
}

/* ---- Books ----------------------------------------------------------------------------------- */

static char *const command[] = {"./train", "--epochs", "10", NULL};

static struct td__flight_book open_book(int slots)
{
    struct td__flight_book book;
    struct td__flight_job job = {.pid = getpid(),
                                 .slots = slots,
                                 .nnodes = 1,
                                 .world_size = slots,
                                 .run_id = "run",
                                 .command = command};
    CHECK_OK(td__flight_book_open(&job, &book));
    return book;
}

static void name_book(const struct td__flight_book *book, int slot)
{
    char place[64];
    td__flight_book_place(book, getpid(), slot, place, sizeof place);
    setenv("TANDEM_FLIGHT", place, 1);
}

static void read_slot(const struct td__flight_book *book, int slot)
{
    struct td__flight_now now;
    struct td__flight_book_info info;
    void *copy = td__flight_book_copy(book);
    td__flight_now(&now);
    CHECK_OK(td__flight_read_head(copy, book->size, &info));
    CHECK_EQ(info.slots, book->slots);
    CHECK_STR(info.command, "./train --epochs 10");
    td__flight_read_log(copy, book->size, slot, &now, &page);
    free(copy);
}

/* The operations of a process that was killed are there. */
static void work_and_die(void *arg)
{
    struct td__flight_log *log;
    (void)arg;
    CHECK_OK(td__flight_open(2, 3, &log));
    td__flight_set_phase(log, TD__FLIGHT_JOINED);
    begin(log, 9, TD__FLIGHT_RUNNING);
    raise(SIGKILL);
}

TEST(pages_outlive_their_process)
{
    struct td__flight_book book = open_book(3);
    name_book(&book, 2);
    struct td_test_child child = td_test_fork(work_and_die, NULL);
    CHECK(WIFSIGNALED(child.status));
    free(child.output);
    td__flight_book_started(&book, 2, 2, 1234);
    td__flight_book_ended(&book, 2, child.status, "killed by SIGKILL");
    read_slot(&book, 2);
    CHECK_EQ(page.phase, TD__FLIGHT_JOINED);
    CHECK_EQ(page.calls[0].sequence, 9);
    CHECK_EQ(page.started_pid, 1234);
    CHECK_EQ(page.wait_status, child.status);
    CHECK_STR(page.ending, "killed by SIGKILL");
    read_slot(&book, 0);
    CHECK_EQ(page.phase, TD__FLIGHT_ABSENT);
    td__flight_book_close(&book);
}

TEST(a_slot_has_one_owner_at_a_time)
{
    struct td__flight_book book = open_book(1);
    struct td__flight_log *first, *second, *third;
    name_book(&book, 0);
    CHECK_OK(td__flight_open(0, 2, &first));
    CHECK_OK(td__flight_open(1, 2, &second)); /* another rank of this process: private */
    begin(second, 2, TD__FLIGHT_RUNNING);
    begin(first, 1, TD__FLIGHT_RUNNING);
    read_slot(&book, 0);
    CHECK_EQ(page.count, 1);
    CHECK_EQ(page.calls[0].sequence, 1);
    td__flight_close(first);
    CHECK_OK(td__flight_open(0, 1, &third)); /* which is fresh again */
    read_slot(&book, 0);
    CHECK_EQ(page.count, 0);
    CHECK_EQ(page.pid, getpid());
    td__flight_close(second);
    td__flight_close(third);

    struct td_test_child child = td_test_fork(work_and_die, NULL);
    free(child.output);
    CHECK_OK(td__flight_open(0, 1, &first)); /* after one that has ended */
    read_slot(&book, 0);
    CHECK_EQ(page.pid, getpid());
    td__flight_close(first);
    td__flight_book_close(&book);
}

/* A waiting process is visible before its rank is known. */
TEST(a_log_is_begun_before_the_rank_is_known)
{
    struct td__flight_book book = open_book(1);
    struct td__flight_log *log;
    name_book(&book, 0);
    td__flight_expect(-1, 0);
    read_slot(&book, 0);
    CHECK_EQ(page.phase, TD__FLIGHT_JOINING);
    CHECK_EQ(page.pid, getpid());
    CHECK_OK(td__flight_open(3, 4, &log));
    read_slot(&book, 0);
    CHECK_EQ(page.rank, 3);
    CHECK_EQ(page.size, 4);
    td__flight_set_phase(log, TD__FLIGHT_JOINED);
    td__flight_give_up(TD_OK, ""); /* it has succeeded */
    read_slot(&book, 0);
    CHECK_EQ(page.phase, TD__FLIGHT_JOINED);
    CHECK_EQ(page.pid, getpid());
    td__flight_close(log);

    td__flight_expect(-1, 0);
    td__flight_give_up(TD_ERR_TIMEOUT, "no rank has joined");
    read_slot(&book, 0);
    CHECK_EQ(page.phase, TD__FLIGHT_JOINING);
    CHECK_EQ(page.pid, 0);
    CHECK_EQ(page.failure, TD_ERR_TIMEOUT);
    CHECK_STR(page.sentence, "no rank has joined");
    td__flight_book_close(&book);
}

/* As when a group grows: the new world is there before the old one is left. */
TEST(a_rank_with_two_worlds_has_one_log)
{
    struct td__flight_book book = open_book(1);
    struct td__flight_log *first, *second;
    name_book(&book, 0);
    CHECK_OK(td__flight_open(0, 2, &first));
    td__flight_set_phase(first, TD__FLIGHT_JOINED);
    begin(first, 1, TD__FLIGHT_RUNNING);
    CHECK_OK(td__flight_open(0, 2, &second));
    CHECK(first == second);
    read_slot(&book, 0);
    CHECK_EQ(page.count, 1);
    CHECK_EQ(page.phase, TD__FLIGHT_JOINING);
    td__flight_close(second); /* it was not used */
    read_slot(&book, 0);
    CHECK_EQ(page.phase, TD__FLIGHT_JOINED);
    CHECK_OK(td__flight_open(0, 2, &second));
    td__flight_set_phase(second, TD__FLIGHT_JOINED);
    td__flight_set_phase(first, TD__FLIGHT_LEAVING);
    td__flight_set_phase(first, TD__FLIGHT_LEFT);
    td__flight_close(first);
    read_slot(&book, 0);
    CHECK_EQ(page.phase, TD__FLIGHT_JOINED);
    td__flight_set_phase(second, TD__FLIGHT_LEFT);
    td__flight_close(second);
    read_slot(&book, 0);
    CHECK_EQ(page.phase, TD__FLIGHT_LEFT);
    td__flight_book_close(&book);
}

/* Whatever the variable says, a log is there; it is private. */
TEST(malformed_locations)
{
    static const char *const places[] = {
        "",
        "1",
        "a:b:c",
        "1:2",
        "1:2:3:4",
        "-1:0:0",
        "1:0:0 ",
        "999999999:3:0",
        "99999999999999999999:1:0",
        "/nowhere/at/all",
        "::",
    };
    td_log_set_level(TD_LOG_ERROR);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        struct td__flight_log *log;
        setenv("TANDEM_FLIGHT", places[i], 1);
        CHECK_OK(td__flight_open(0, 1, &log));
        begin(log, 1, TD__FLIGHT_RUNNING);
        CHECK_EQ(read_page(log)->count, 1);
        td__flight_close(log);
    }
}

static void check_private(int fd, int slot)
{
    struct td__flight_log *log;
    char place[64];
    snprintf(place, sizeof place, "%d:%d:%d", (int)getpid(), fd, slot);
    setenv("TANDEM_FLIGHT", place, 1);
    CHECK_OK(td__flight_open(0, 1, &log));
    CHECK(log->map == log->bytes); /* not behind the head of a book */
    td__flight_close(log);
}

TEST(malformed_books)
{
    td_log_set_level(TD_LOG_ERROR);
    struct td__flight_book book = open_book(1);
    int ends[2], memory = memfd_create("other", MFD_ALLOW_SEALING);
    CHECK_EQ(pipe(ends), 0);
    check_private(ends[0], 0);
    check_private(STDIN_FILENO, 0);
    check_private(memory, 0); /* empty */
    CHECK_EQ(ftruncate(memory, (off_t)book.size), 0);
    check_private(memory, 0); /* could shrink */
    CHECK_EQ(fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    check_private(memory, 0);  /* has no head */
    check_private(book.fd, 1); /* has no such slot */
    td__flight_book_close(&book);
}

TEST(pages_in_files)
{
    char prefix[512], path[600];
    struct td__flight_log *log;
    struct td__flight_now now;
    struct td__flight_book_info info;
    snprintf(prefix, sizeof prefix, "%s/flight", td_test_temp_dir());
    snprintf(path, sizeof path, "%s.3", prefix);
    setenv("TANDEM_FLIGHT", prefix, 1);
    CHECK_OK(td__flight_open(3, 8, &log));
    begin(log, 4, TD__FLIGHT_RUNNING);
    td__flight_close(log);
    size_t size = TD__FLIGHT_HEAD + sizeof(struct td__flight_bytes);
    char *bytes = malloc(size);
    int fd = open(path, O_RDONLY);
    CHECK_EQ(read(fd, bytes, size), (ssize_t)size);
    close(fd);
    td__flight_now(&now);
    CHECK_OK(td__flight_read_head(bytes, size, &info));
    td__flight_read_log(bytes, size, 0, &now, &page);
    CHECK_EQ(page.rank, 3);
    CHECK_EQ(page.calls[0].sequence, 4);

    /* On another machine, or after a restart, times come from the page alone. */
    int64_t here = page.calls[0].queued_ns;
    now.boot++;
    now.ticks = 5;
    td__flight_read_log(bytes, size, 0, &now, &page);
    CHECK(!page.here);
    CHECK(page.calls[0].queued_ns > here - 1000000000 &&
          page.calls[0].queued_ns < here + 1000000000);

    CHECK_FAILS(td__flight_read_head(bytes, 100, &info), TD_ERR_INVALID, "too few");
    bytes[0] ^= 1;
    CHECK_FAILS(td__flight_read_head(bytes, size, &info), TD_ERR_INVALID, "no page");
    free(bytes);
}

static void keep_warning(td_log_level level, const char *text, void *arg)
{
    (void)level;
    snprintf(arg, 300, "%s", text);
}

static void check_refused(const char *why)
{
    char said[300] = "";
    struct td__flight_log *log;
    td_log_set_sink(keep_warning, said);
    CHECK_OK(td__flight_open(0, 1, &log));
    td_log_set_sink(NULL, NULL);
    CHECK(log->map == log->bytes);
    CHECK_CONTAINS(said, why);
    td__flight_close(log);
}

TEST(a_wrong_location_is_reported)
{
    setenv("TANDEM_FLIGHT", "1:2:3", 1);
    check_refused("process 1 has no page 3 of a flight recorder open as 2");
    setenv("TANDEM_FLIGHT", "1:2", 1);
    check_refused("it must be a path with a slash");
}

/* A process that may write to a file may truncate it while it is mapped. */
TEST(files_of_others)
{
    char prefix[512], path[600], other[600];
    snprintf(prefix, sizeof prefix, "%s/flight", td_test_temp_dir());
    snprintf(path, sizeof path, "%s.0", prefix);
    snprintf(other, sizeof other, "%s.other", prefix);
    setenv("TANDEM_FLIGHT", prefix, 1);
    CHECK_EQ(symlink(other, path), 0);
    check_refused("it is a symbolic link");
    unlink(path);
    CHECK_EQ(mkfifo(path, 0600), 0);
    check_refused("it is no plain file");
    unlink(path);
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    CHECK_EQ(fchmod(fd, 0620), 0);
    check_refused("others may write to it");
    CHECK_EQ(fchmod(fd, 0644), 0);
    if (geteuid() == 0) { /* only root can make one */
        CHECK_EQ(fchown(fd, 65534, 65534), 0);
        check_refused("it belongs to another user");
    }
    struct stat found;
    CHECK_EQ(fstat(fd, &found), 0);
    CHECK_EQ(found.st_size, 0);
    close(fd);
}

/* A file that is something else is not written to, and one that is in use is not cut. */
TEST(files_that_are_in_use)
{
    char prefix[512], path[600], text[16] = "";
    struct td__flight_log *log, *other;
    snprintf(prefix, sizeof prefix, "%s/flight", td_test_temp_dir());
    snprintf(path, sizeof path, "%s.0", prefix);
    setenv("TANDEM_FLIGHT", prefix, 1);
    td_log_set_level(TD_LOG_ERROR);
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    CHECK_EQ(write(fd, "my thesis", 9), 9);
    CHECK_OK(td__flight_open(0, 1, &log));
    CHECK(log->map == log->bytes);
    td__flight_close(log);
    CHECK_EQ(pread(fd, text, sizeof text, 0), 9);
    CHECK_STR(text, "my thesis");
    close(fd);
    unlink(path);

    CHECK_OK(td__flight_open(0, 1, &log));
    CHECK_OK(td__flight_open(0, 1, &other));
    CHECK(log == other);
    begin(log, 1, TD__FLIGHT_RUNNING);
    td__flight_close(other);
    td__flight_close(log);
    CHECK_OK(td__flight_open(0, 1, &log)); /* again, from its beginning */
    CHECK(log->map != log->bytes);
    CHECK_EQ(read_page(log)->count, 0);
    td__flight_close(log);
}
