/* Sharded checkpoints in trouble: full disks, damaged and missing files, hostile indexes, shards that do not fit together,
 * and ranks that are killed while they save. */
#include "forks.h"
#include "runner.h"
#include "sharded_states.h"
#include "worlds.h"

#include "checkpoint/crc32c.h"
#include "checkpoint/sharded.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *temp_path(const char *name)
{
    static char path[4][512];
    static int next;
    char *text = path[next++ % 4];
    snprintf(text, sizeof path[0], "%s/%s", td_test_temp_dir(), name);
    return text;
}

/* ---- Saving ------------------------------------------------------------------------------------------ */

static void limit_files(rlim_t bytes)
{
    struct rlimit limit;
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes;
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

RANKS(one_rank_has_no_room, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    struct cut_plan plan = {.seed = 1, .ranks = 3, .value = 1, .big = true};
    td_state *state = sharded_state(&plan, td_test_rank(), true);
    td_async_save *save = NULL;
    CHECK_OK(td_save_sharded(temp_path("a"), state, NULL, 0, NULL, NULL));
    for (int i = 0; i < 2; i++) {
        if (td_test_rank() == 1)
            limit_files(30000);
        td_status status = td_save_sharded(temp_path("a"), state, NULL, 0, NULL, i ? &save : NULL);
        if (i && !status)
            status = td_async_save_wait(save, 0);
        limit_files(RLIM_INFINITY);
        CHECK_EQ(status, TD_ERR_SYSTEM);
        CHECK_CONTAINS(td_last_error(), "rank 1: td_save_sharded: ");
        CHECK_CONTAINS(td_last_error(),
                       "/a/shard-00001.safetensors cannot be written, at \"tensor.");
        CHECK_EQ(td_test_count_files(td_test_temp_dir()), 1);
        td_test_barrier();
    }
    td_async_save_release(save);
    CHECK_OK(td_load_sharded(temp_path("a"), state, NULL));
    check_sharded_state(state, 1);
    td_state_destroy(state);
    CHECK_OK(td_destroy_process_group());
}

RANKS(shards_that_do_not_fit, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    td_state *state = td_state_create();
    td_tensor *tensor = td_zeros(TD_SHAPE(5), TD_F32, NULL);
    CHECK_OK(td_state_add(state, "x", tensor));
    td_shard shard = {.ndim = 1, .shape = {10}, .offset = td_test_rank() * 4};
    CHECK_OK(td_tensor_set_shard(tensor, &shard));
    CHECK_FAILS(td_save_sharded(temp_path("a"), state, NULL, 0, NULL, NULL), TD_ERR_MISMATCH,
                "the shards of \"x\" do not fit together: rank 1 has 5 elements from 4 on");
    shard.offset = 0;
    CHECK_OK(td_tensor_set_shard(tensor, &shard));
    CHECK_FAILS(td_save_sharded(temp_path("a"), state, NULL, 0, NULL, NULL), TD_ERR_MISMATCH,
                "no rank has the elements of \"x\" from 5 on, of 10");
    if (td_test_rank() == 1)
        CHECK_OK(td_tensor_set_shard(tensor, NULL));
    CHECK_FAILS(td_save_sharded(temp_path("a"), state, NULL, 0, NULL, NULL), TD_ERR_MISMATCH,
                "rank 1 has \"x\" as f");
    CHECK_FAILS(td_save_sharded(temp_path("a"), td_test_rank() ? NULL : state, NULL, 0, NULL, NULL),
                TD_ERR_INVALID, "rank 1: td_save_sharded: the state is NULL");
    td_state *empty = td_state_create();
    CHECK_FAILS(td_save_sharded(NULL, empty, NULL, 0, NULL, NULL), TD_ERR_INVALID,
                "the directory is NULL");
    td_state_destroy(empty);
    CHECK_EQ(td_test_count_files(td_test_temp_dir()), 0);
    td_tensor_release(tensor);
    td_state_destroy(state);
    CHECK_OK(td_destroy_process_group());
}

TEST(other_directories_are_not_replaced)
{
    td_state *state = td_state_create();
    CHECK_OK(td_state_add_number(state, "x", 1));
    CHECK_EQ(mkdir(temp_path("mine"), 0777), 0);
    CHECK_OK(td_save_sharded(temp_path("mine/"), state, NULL, 0, NULL, NULL)); /* it was empty */
    CHECK_EQ(mkdir(temp_path("other"), 0777), 0);
    CHECK_EQ(mkdir(temp_path("other/file"), 0777), 0);
    CHECK_FAILS(td_save_sharded(temp_path("other"), state, NULL, 0, NULL, NULL), TD_ERR_SYSTEM,
                "neither a sharded checkpoint nor an empty directory");
    CHECK_EQ(td_test_count_files(temp_path("other")), 1);
    CHECK_FAILS(td_load_sharded(temp_path("other"), state, NULL), TD_ERR_SYSTEM, "index.json");
    CHECK_FAILS(td_load_sharded(temp_path("none"), state, NULL), TD_ERR_SYSTEM, "none/index.json");
    td_state_destroy(state);
}

/* ---- Loading ----------------------------------------------------------------------------------------- */

static void change_byte(const char *path, off_t at)
{
    uint8_t byte;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    CHECK_EQ(pread(fd, &byte, 1, at), 1);
    byte ^= 0x40;
    CHECK_EQ(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static off_t size_of(const char *path)
{
    struct stat there;
    CHECK_EQ(stat(path, &there), 0);
    return there.st_size;
}

/* Rank 0 makes the damage; the load fails on both, and changes nothing. */
static void check_refused(td_state *state, const char *first, const char *second)
{
    td_test_barrier();
    td_status status = td_load_sharded(temp_path("a"), state, NULL);
    CHECK_EQ(status, TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), first);
    CHECK_CONTAINS(td_last_error(), second);
    check_untouched_state(state);
    td_test_barrier();
}

RANKS(damage, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    bool root = td_test_rank() == 0;
    struct cut_plan plan = {.seed = 1, .ranks = 2, .value = 1, .big = true};
    td_state *state = sharded_state(&plan, td_test_rank(), true);
    CHECK_OK(td_save_sharded(temp_path("a"), state, NULL, 0, NULL, NULL));
    td_state_destroy(state);
    state = sharded_state(&plan, td_test_rank(), false);
    char shard[512], index[512];
    snprintf(shard, sizeof shard, "%s", temp_path("a/shard-00001.safetensors"));
    snprintf(index, sizeof index, "%s", temp_path("a/index.json"));
    off_t size = size_of(shard), end = size_of(index);
    for (off_t at = 5000; at < size; at += size / 3) {
        if (root)
            change_byte(shard, at);
        check_refused(state, "shard-00001.safetensors is damaged: the checksum of", "\"tensor.");
        if (root)
            change_byte(shard, at);
    }
    for (off_t at = 0; at < end; at += end / 20) {
        if (root)
            change_byte(index, at);
        check_refused(state, "index.json", "checksum");
        if (root)
            change_byte(index, at);
    }
    if (root)
        CHECK_EQ(truncate(shard, size - 1), 0);
    check_refused(state, "shard-00001.safetensors is damaged: it has", "when it was written");
    if (root)
        CHECK_EQ(unlink(shard), 0);
    td_test_barrier();
    CHECK_FAILS(td_load_sharded(temp_path("a"), state, NULL), TD_ERR_SYSTEM,
                "shard-00001.safetensors cannot be read");
    check_untouched_state(state);
    td_state_destroy(state);
    CHECK_OK(td_destroy_process_group());
}

RANKS(tensors_that_do_not_fit, .ranks = 2)
{
    CHECK_OK(td_init_process_group(NULL));
    struct cut_plan plan = {.seed = 1, .ranks = 2, .value = 1};
    td_state *state = sharded_state(&plan, td_test_rank(), true);
    CHECK_OK(td_save_sharded(temp_path("a"), state, NULL, 0, NULL, NULL));
    td_state_destroy(state);
    state = sharded_state(&plan, td_test_rank(), false);
    if (td_test_rank() == 1)
        CHECK_OK(td_state_add_number(state, "more", 1));
    CHECK_FAILS(td_load_sharded(temp_path("a"), state, NULL), TD_ERR_INVALID,
                "rank 1: td_load_sharded: ");
    CHECK_CONTAINS(td_last_error(), "\"more\" is not in the checkpoint");
    td_tensor *tensor = td_state_get(state, "tensor.0");
    td_shard shard = *td_tensor_shard(tensor);
    shard.shape[0]++;
    if (td_test_rank() == 1)
        CHECK_OK(td_tensor_set_shard(tensor, &shard));
    CHECK_FAILS(td_load_sharded(temp_path("a"), state, NULL), TD_ERR_INVALID,
                "of the shape [30, 41] in the checkpoint");
    CHECK_CONTAINS(td_last_error(), "\"tensor.0\"");
    td_training training = {0};
    CHECK_FAILS(td_training_load_sharded(temp_path("a"), &training, NULL), TD_ERR_INVALID,
                "no checkpoint of a training");
    td_state_destroy(state);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Hostile indexes ----------------------------------------------------------------------------------- */

static td_status parse(const char *body)
{
    char text[4096];
    struct td__index index;
    int length = snprintf(text, sizeof text, "%s", body);
    length += snprintf(text + length, sizeof text - (size_t)length, ",\"crc32c\":\"%08x\"}\n",
                       td__crc32c(0, text, (size_t)length));
    td_status status = td__index_parse("the index", text, (size_t)length, &index);
    if (!status)
        td__index_free(&index);
    return status;
}

#define START "{\"tandem.sharded\":1,\"ranks\":1,\"kind\":\"tensors\",\"notes\":{},"
#define FILES "\"files\":[{\"name\":\"shard-00000.safetensors\",\"size\":100}],"
#define INDEX(tensors) START FILES "\"tensors\":{" tensors "}"
#define TENSOR(shape, pieces) "\"x\":{\"dtype\":\"F32\",\"shape\":" shape ",\"pieces\":" pieces "}"

TEST(hostile_indexes)
{
    CHECK_OK(parse(INDEX("")));
    CHECK_OK(parse(INDEX(TENSOR("[5]", "[[0,0,5,10,\"00000000\"]]"))));
    CHECK_OK(parse(INDEX(TENSOR("[5]", "[[0,0,2,10,\"00000000\"],[0,2,3,10,\"00000000\"]]"))));
    static const struct {
        const char *body, *error;
    } bad[] = {
        {INDEX(TENSOR("[5]", "[[0,0,5,81,\"00000000\"]]")), "shorter or not there"},
        {INDEX(TENSOR("[5]", "[[1,0,5,10,\"00000000\"]]")), "shorter or not there"},
        {INDEX(TENSOR("[5]", "[[0,0,4,10,\"00000000\"]]")), "have 4 of its 5"},
        {INDEX(TENSOR("[5]", "[[0,1,4,10,\"00000000\"]]")), "a piece of 4 from 1 on"},
        {INDEX(TENSOR("[5]", "[[0,0,6,10,\"00000000\"]]")), "a piece of 6 from 0 on"},
        {INDEX(TENSOR("[5]", "[[0,0,0,10,\"\"],[0,0,5,10,\"00000000\"]]")), "a piece of 0"},
        {INDEX(TENSOR("[5]", "[[0,0,5,10,\"\"]]")), "0 checksums, and needs 1"},
        {INDEX(TENSOR("[5]", "[[0,0,5,10,\"0000000g\"]]")), "8 hexadecimal digits"},
        {INDEX(TENSOR("[5]", "[[0,0,5,10,\"0000000\"]]")), "8 hexadecimal digits"},
        {INDEX(TENSOR("[5]", "[[0,0,5,9223372036854775807,\"00000000\"]]")), "shorter"},
        {INDEX(TENSOR("[9223372036854775807,3]", "[]")), "x"},
        {INDEX(TENSOR("[4294967296,4294967296,0]", "[]")), "x"},
        {INDEX(TENSOR("[1,1,1,1,1,1,1,1,1]", "[]")), "more dimensions"},
        {INDEX(TENSOR("[0]", "[]") "," TENSOR("[0]", "[]")), "a second time"},
        {INDEX("\"\":{\"dtype\":\"F32\",\"shape\":[0],\"pieces\":[]}"), "is empty"},
        {INDEX("\"x\":{\"dtype\":\"F3\",\"shape\":[0],\"pieces\":[]}"), "this dtype"},
        {INDEX("\"x\":{\"dtype\":\"F32\",\"shape\":[0]}"), "lacks a field"},
        {START "\"files\":[{\"name\":\"../../../etc/passwd\",\"size\":100}],\"tensors\":{}",
         "another name"},
        {START "\"files\":[],\"tensors\":{}", "0 files"},
        {START FILES FILES "\"tensors\":{}", "a second time"},
        {"{\"tandem.sharded\":0,\"ranks\":1,\"kind\":\"tensors\",\"notes\":{}," FILES
         "\"tensors\":{}",
         "version 0"},
        {"{\"tandem.sharded\":1", "lacks a field"},
        {"", "must"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        td_status status = parse(bad[i].body);
        if (status != TD_ERR_INVALID)
            FAIL("body %zu has the status %d", i, (int)status);
        CHECK_CONTAINS(td_last_error(), "the index");
        if (*bad[i].body)
            CHECK_CONTAINS(td_last_error(), bad[i].error);
    }
    CHECK_FAILS(parse("{\"tandem.sharded\":2,\"ranks\":1,\"kind\":\"\",\"notes\":{}," FILES
                      "\"tensors\":{}"),
                TD_ERR_UNSUPPORTED, "a later version");
}

/* ---- Ranks that are killed ------------------------------------------------------------------------------- */

enum { WIDTH = 400, WRITERS = 2 };

struct writing {
    struct init_url init;
    char directory[512];
    int64_t from;
    _Atomic int64_t *done; /* the last step that was reported */
    int rank;
    bool async;
    bool at_start; /* one may die before it has met the other, which then waits for it */
};

/* A weight that is divided among the writers, all of whose elements are the step. */
static td_training make_training(int rank, int ranks)
{
    td_module *net = td_linear(WIDTH, WIDTH);
    int64_t count = WIDTH * WIDTH / ranks;
    td_tensor *part = td_zeros(&count, 1, TD_F32, NULL);
    td_shard shard = {.ndim = 2, .shape = {WIDTH, WIDTH}, .offset = rank * count};
    if (ranks > 1) {
        CHECK_OK(td_tensor_set_shard(part, &shard));
        CHECK_OK(td_module_set_tensor(net, "weight", part));
    }
    td_tensor_release(part);
    return (td_training){.model = net, .any_size = true};
}

static void write_forever(void *arg)
{
    struct writing *writing = arg;
    td_init_options options = {.init_method = writing->init.url,
                               .world_size = WRITERS,
                               .rank = writing->rank,
                               .timeout_ms = writing->at_start ? 2000 : 0};
    if (td_init_process_group(&options))
        _exit(0);
    td_training training = make_training(writing->rank, WRITERS);
    for (training.step = writing->from;; training.step++) {
        td_async_save *save = NULL;
        td_init_constant(td_module_parameter(training.model, "weight"), (double)training.step);
        if (td_training_save_sharded_numbered(writing->directory, &training, 2, NULL,
                                              writing->async ? &save : NULL) ||
            (save && td_async_save_wait(save, 0)))
            _exit(0); /* the other one is dead */
        td_async_save_release(save);
        if (writing->rank == 0)
            atomic_store(writing->done, training.step);
    }
}

static int count_temporary(const char *directory)
{
    int count = 0;
    DIR *stream = opendir(directory);
    for (struct dirent *entry; stream && (entry = readdir(stream));)
        count += !strncmp(entry->d_name, ".tandem-", 8);
    if (stream)
        closedir(stream);
    return count;
}

/* The newest one loads, and is not older than what was reported. Its step. */
static int64_t check_newest(const char *directory, int64_t reported)
{
    td_training training = make_training(0, 1);
    bool loaded = false;
    CHECK_OK(td_training_load_latest(directory, &training, NULL, &loaded));
    CHECK(loaded || reported < 0);
    if (loaded && training.step < reported)
        FAIL("step %lld was reported, %lld is there", (long long)reported,
             (long long)training.step);
    const float *weight = td_tensor_data(td_module_parameter(training.model, "weight"));
    for (int i = 0; i < WIDTH * WIDTH && loaded; i++)
        CHECK(weight[i] == (float)training.step);
    td_module_destroy(training.model);
    return loaded ? training.step : -1;
}

static void kill_round(struct writing *writing, unsigned *seed)
{
    pid_t pids[WRITERS];
    struct writing each[WRITERS];
    writing->init = file_init_url();
    writing->async = rand_r(seed) % 2;
    writing->at_start = rand_r(seed) % 4 == 0;
    for (int r = 0; r < WRITERS; r++) {
        each[r] = *writing;
        each[r].rank = r;
        pids[r] = fork_start(write_forever, &each[r]);
    }
    CHECK_SOON(writing->at_start || atomic_load(writing->done) >= writing->from);
    nanosleep(&(struct timespec){.tv_nsec = rand_r(seed) % 30000 * 1000}, NULL);
    int first = rand_r(seed) % WRITERS;
    fork_kill(pids[first], SIGKILL);
    fork_join(pids[1 - first]); /* it ends by itself */
    if (first == 1)
        CHECK_EQ(count_temporary(writing->directory), 0);
    int64_t step = check_newest(writing->directory, atomic_load(writing->done));
    CHECK_EQ(count_temporary(writing->directory), 0);
    writing->from = step + 1;
    unlink(writing->init.url + strlen("file://"));
}

TEST(killed_ranks_leave_a_whole_checkpoint, .deadline_s = 600)
{
    const char *wanted = getenv("TD_TEST_KILLS");
    unsigned seed = (unsigned)getpid();
    struct writing writing = {.done = fork_shared(sizeof *writing.done)};
    snprintf(writing.directory, sizeof writing.directory, "%s", temp_path("run"));
    atomic_store(writing.done, -1);
    for (int left = wanted ? atoi(wanted) : 8; left > 0; left--)
        kill_round(&writing, &seed);
}
