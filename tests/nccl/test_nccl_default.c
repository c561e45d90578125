/* Groups that have chosen no backend: the first call on the device loads nccl, on all ranks or on none. */
#include "nccl_world.h"

#include <pthread.h>
#include <string.h>

static bool is_loaded(void)
{
    td_plugin_info *plugins;
    int count;
    bool loaded = false;
    CHECK_OK(td_list_plugins(false, &plugins, &count));
    for (int i = 0; i < count; i++)
        loaded = loaded ||
                 (!strcmp(plugins[i].name, "nccl") && plugins[i].state == TD_PLUGIN_LOADED);
    td_free_plugin_list(plugins);
    return loaded;
}

static void begin(void)
{
    nccl_prepare();
    CHECK_OK(td_init_process_group(&(td_init_options){.timeout_ms = 60000}));
}

static void lose_library(void)
{
    setenv("TANDEM_NCCL_SO", "/nowhere/libnccl.so.2", 1);
}

RANKS(the_first_call_on_the_device_loads_it, .ranks = 2)
{
    begin();
    td_tensor *x = td_ones(TD_SHAPE(3), TD_F32, NULL), *y = td_tensor_to(x, nccl_device());
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
    CHECK(!is_loaded());
    CHECK_OK(td_all_reduce(y, TD_SUM, NULL, NULL));
    CHECK(is_loaded());
    CHECK_EQ(nccl_item(y, 2), 2);
    if (!nccl_is_real())
        CHECK_EQ(nccl_fake_live(), 1);
    td_tensor_release(x);
    td_tensor_release(y);
    nccl_end();
}

/* Only two of three ranks use the device, and by messages. */
RANKS(messages_load_it, .ranks = 3)
{
    begin();
    int rank = td_get_rank(NULL);
    td_tensor *x = td_full(TD_SHAPE(3), rank, TD_F32, nccl_device());
    if (rank == 0)
        CHECK_OK(td_send(x, 2, 0, NULL));
    if (rank == 2) {
        CHECK_OK(td_recv(x, 0, 0, NULL, NULL));
        CHECK_EQ(nccl_sum(x), 0);
    }
    CHECK_EQ(is_loaded(), rank != 1);
    td_tensor_release(x);
    nccl_end();
}

static int warnings;
static char warning[1024];

static void keep_warning(td_log_level level, const char *line, void *arg)
{
    (void)arg;
    if (level == TD_LOG_WARN && strstr(line, "by way of the host")) {
        warnings++;
        snprintf(warning, sizeof warning, "%s", line);
    }
}

RANKS(without_it_on_all_ranks, .ranks = 2)
{
    nccl_needs_fake();
    begin();
    lose_library();
    td_log_set_sink(keep_warning, NULL);
    td_group *group;
    td_tensor *x = td_ones(TD_SHAPE(3), TD_F32, nccl_device());
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    CHECK_OK(td_all_reduce(x, TD_SUM, group, NULL));
    CHECK_EQ(nccl_item(x, 2), 4);
    CHECK(!is_loaded());
    CHECK_EQ(warnings, 1);
    CHECK_CONTAINS(warning, "calls on memory of toy go by way of the host, since backend \"nccl\" "
                            "cannot be used");
    CHECK_CONTAINS(warning, "/nowhere/libnccl.so.2");
    td_log_set_sink(NULL, NULL);
    td_tensor_release(x);
    CHECK_OK(td_group_destroy(group));
    nccl_end();
}

/* `first` calls before the other one, which finds the difference. */
static void differ(int without, int first)
{
    char own[160], other[160];
    nccl_needs_fake();
    begin();
    int rank = td_get_rank(NULL), second = 1 - first;
    if (rank == without)
        lose_library();
    td_tensor *x = td_ones(TD_SHAPE(3), TD_F32, nccl_device());
    td_work *work = NULL;
    if (rank == first)
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
    td_test_barrier();
    snprintf(own, sizeof own, "rank %d has backend \"%s\" for toy, but rank %d has \"%s\" (",
             second, second == without ? "native" : "nccl", first,
             first == without ? "native" : "nccl");
    snprintf(other, sizeof other, "rank %d and rank %d have different backends", second, first);
    if (rank == second) {
        CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_MISMATCH, own);
        CHECK_CONTAINS(td_last_error(), "/nowhere/libnccl.so.2");
        CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_MISMATCH, own);
    } else {
        CHECK_FAILS(td_work_wait(work, 0), TD_ERR_MISMATCH, other);
    }
    td_work_release(work);
    td_tensor_release(x);
    td_destroy_process_group();
}

RANKS(a_rank_without_it_comes_later, .ranks = 2)
{
    differ(1, 0);
}

RANKS(a_rank_without_it_comes_first, .ranks = 2)
{
    differ(0, 0);
}
