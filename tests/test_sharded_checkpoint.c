/* Sharded checkpoints: saved by some ranks, loaded by others with other cuts; training; asynchronous saves; one file. */
#include "runner.h"
#include "sharded_states.h"

#include "checkpoint/crc32c.h"
#include "checkpoint/sharded.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { RANKS_MOST = 4 };

static const char *temp_path(const char *name)
{
    static char path[4][512];
    static int next;
    char *text = path[next++ % 4];
    snprintf(text, sizeof path[0], "%s/%s", td_test_temp_dir(), name);
    return text;
}

TEST(crc32c)
{
    uint8_t data[40000];
    CHECK_EQ(td__crc32c(0, "123456789", 9), 0xe3069283);
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 7 + i / 256);
    for (size_t size = 0; size < sizeof data; size += 997) {
        uint32_t sum = td__crc32c(0, data, size);
        CHECK_EQ(sum, td__crc32c_generic(0, data, size));
        CHECK_EQ(sum, td__crc32c(td__crc32c(0, data, size / 3), data + size / 3, size - size / 3));
    }
}

/* ---- States ----------------------------------------------------------------------------------------- */

/* Saved by the first `from` ranks, loaded by the first `to`. */
static void roundtrip(int from, int to, bool whole, const char *path)
{
    struct cut_plan save = {.seed = (unsigned)(from * 10 + to), .ranks = from, .value = from + to};
    struct cut_plan load = {.seed = (unsigned)(from * 100 + to), .ranks = to, .whole = whole};
    save.big = load.big = from + to > 6;
    td_group *savers = first_ranks(from), *loaders = first_ranks(to);
    int rank = td_test_rank();
    if (rank < from) {
        td_state *state = sharded_state(&save, rank, true);
        CHECK_OK(td_save_sharded(path, state, &(td_file_note){"key", "value"}, 1, savers, NULL));
        td_state_destroy(state);
    }
    CHECK_OK(td_barrier(NULL, NULL));
    CHECK_EQ(td_test_count_files(path), from + 1);
    if (rank < to) {
        td_state *state = sharded_state(&load, rank, false);
        CHECK_OK(td_load_sharded(path, state, loaders));
        check_sharded_state(state, save.value);
        td_state_destroy(state);
    }
    CHECK_OK(td_barrier(NULL, NULL));
    CHECK_OK(td_group_destroy(savers));
    CHECK_OK(td_group_destroy(loaders));
}

RANKS(other_ranks_and_other_cuts, .ranks = RANKS_MOST, .deadline_s = 60)
{
    CHECK_OK(td_init_process_group(NULL));
    for (int from = 1; from <= RANKS_MOST; from++)
        for (int to = 1; to <= RANKS_MOST; to++) {
            roundtrip(from, to, false, temp_path("a")); /* replaces the one before */
            roundtrip(from, to, true, temp_path("b"));
        }
    CHECK_EQ(td_test_count_files(td_test_temp_dir()), 2);
    CHECK_OK(td_destroy_process_group());
}

TEST(one_process)
{
    struct cut_plan plan = {.ranks = 1, .value = 3, .big = true};
    td_state *state = sharded_state(&plan, 0, true), *other = sharded_state(&plan, 0, false);
    CHECK_OK(td_save_sharded(temp_path("one"), state, NULL, 0, NULL, NULL));
    uint64_t before = td__shard_bytes_read();
    CHECK_OK(td_load_sharded(temp_path("one"), other, NULL));
    CHECK_EQ(td__shard_bytes_read() - before, state_bytes(state));
    check_sharded_state(other, 3);
    td_state *file = td_load_safetensors(temp_path("one/shard-00000.safetensors"), NULL);
    CHECK(file != NULL);
    CHECK_EQ(td_state_count(file), td_state_count(state) - 2); /* without those of no elements */
    td_state_destroy(file);
    td_state_destroy(state);
    td_state_destroy(other);
}

RANKS(each_byte_is_read_once, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    struct cut_plan plan = {.seed = 4, .ranks = 3, .value = 5, .big = true};
    td_state *state = sharded_state(&plan, td_test_rank(), true);
    CHECK_OK(td_save_sharded(temp_path("c"), state, NULL, 0, NULL, NULL));
    uint64_t before = td__shard_bytes_read();
    CHECK_OK(td_load_sharded(temp_path("c"), state, NULL));
    CHECK_EQ(td__shard_bytes_read() - before, state_bytes(state));
    plan.seed = 5;
    td_state *other = sharded_state(&plan, td_test_rank(), false);
    before = td__shard_bytes_read();
    CHECK_OK(td_load_sharded(temp_path("c"), other, NULL));
    /* At most two blocks more for each piece. */
    CHECK(td__shard_bytes_read() - before <
          state_bytes(other) + (uint64_t)td_state_count(other) * 4 * TD__SUM_BLOCK);
    check_sharded_state(other, 5);
    td_state_destroy(state);
    td_state_destroy(other);
    CHECK_OK(td_destroy_process_group());
}

RANKS(equal_shards_are_written_once, .ranks = 4)
{
    /* Two replicas of two shards, as in hybrid sharding. */
    CHECK_OK(td_init_process_group(NULL));
    struct cut_plan plan = {.seed = 9, .ranks = 2, .value = 1, .big = true};
    td_state *state = sharded_state(&plan, td_test_rank() % 2, true);
    CHECK_OK(td_save_sharded(temp_path("d"), state, NULL, 0, NULL, NULL));
    td_state *other = sharded_state(&plan, td_test_rank() / 2, false);
    CHECK_OK(td_load_sharded(temp_path("d"), other, NULL));
    check_sharded_state(other, 1);
    td_state_destroy(state);
    td_state_destroy(other);
    CHECK_OK(td_destroy_process_group());
}

/* ---- The whole ---------------------------------------------------------------------------------------- */

/* tdmerge writes the same file. */
static void run_tool(void)
{
    struct td_test_child child = td_test_exec(
        (const char *const[]){TD_TEST_BUILD_DIR "/bin/tdmerge", temp_path("e"),
                              temp_path("tool.safetensors"), "--prefix", "tensor.", NULL});
    CHECK_EQ(child.status, 0);
    free(child.output);
    td_state *file = td_load_safetensors(temp_path("tool.safetensors"), NULL);
    CHECK(file && td_state_get(file, "0"));
    td_state_destroy(file);
    child = td_test_exec((const char *const[]){TD_TEST_BUILD_DIR "/bin/tdmerge", temp_path("none"),
                                               temp_path("x"), NULL});
    CHECK(child.status != 0);
    CHECK_CONTAINS(child.output, "none/index.json cannot be read");
    free(child.output);
}

RANKS(full_states, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    struct cut_plan plan = {.seed = 2, .ranks = 3, .value = 8, .big = true};
    td_state *state = sharded_state(&plan, td_test_rank(), true), *full = NULL;
    CHECK_OK(td_gather_state(state, NULL, &full));
    CHECK_EQ(full != NULL, td_test_rank() == 0);
    CHECK_OK(td_save_full(temp_path("full.safetensors"), state, NULL));
    CHECK_OK(td_save_sharded(temp_path("e"), state, NULL, 0, NULL, NULL));
    if (td_test_rank() == 0) {
        CHECK_EQ(td_state_count(full), td_state_count(state));
        check_sharded_state(full, 8);
        CHECK_OK(td_merge_sharded(temp_path("e"), temp_path("merged.safetensors"), NULL));
        const char *const names[] = {"full.safetensors", "merged.safetensors"};
        for (int i = 0; i < 2; i++) {
            td_state *file = td_load_safetensors(temp_path(names[i]), NULL);
            CHECK(file != NULL);
            CHECK_EQ(td_state_count(file), td_state_count(state));
            check_sharded_state(file, 8);
            td_state_destroy(file);
        }
        CHECK_FAILS(td_merge_sharded(temp_path("e"), temp_path("x"), "none."), TD_ERR_INVALID,
                    "\"none.\"");
        run_tool();
    }
    CHECK_FAILS(td_save_full(temp_path("none/full.safetensors"), state, NULL), TD_ERR_SYSTEM,
                "none/full.safetensors");
    td_state_destroy(full);
    td_state_destroy(state);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Asynchronous saves --------------------------------------------------------------------------------- */

RANKS(asynchronous, .ranks = 3)
{
    CHECK_OK(td_init_process_group(NULL));
    struct cut_plan plan = {.seed = 2, .ranks = 3, .value = 1, .big = true};
    td_async_save *saves[3];
    for (int i = 0; i < 3; i++) {
        plan.value = i;
        td_state *state = sharded_state(&plan, td_test_rank(), true);
        CHECK_OK(td_save_sharded(temp_path("f"), state, NULL, 0, NULL, &saves[i]));
        for (int k = 0; k < td_state_count(state); k++) /* it has a copy */
            if (td_tensor_nbytes(td_state_tensor(state, k)))
                memset(td_tensor_data(td_state_tensor(state, k)), 0,
                       td_tensor_nbytes(td_state_tensor(state, k)));
        td_state_destroy(state);
        for (int k = 0; k < 10; k++) /* the program's own calls go on */
            CHECK_OK(td_barrier(NULL, NULL));
    }
    for (int i = 0; i < 3; i++) {
        CHECK_OK(td_async_save_wait(saves[i], 0));
        CHECK(td_async_save_test(saves[i]));
        td_async_save_release(saves[i]);
    }
    td_state *state = sharded_state(&plan, td_test_rank(), false);
    CHECK_OK(td_load_sharded(temp_path("f"), state, NULL));
    check_sharded_state(state, 2);
    td_async_save *save;
    CHECK_FAILS(td_save_sharded(temp_path("none/f"), state, NULL, 0, NULL, &save), TD_ERR_SYSTEM,
                "none/f");
    CHECK(save == NULL);
    td_state_destroy(state);
    CHECK_EQ(td_test_count_files(td_test_temp_dir()), 1);
    CHECK_OK(td_destroy_process_group());
}
