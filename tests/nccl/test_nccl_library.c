/* Which libnccl the plug-in takes, and what it says about those that it does not. */
#include "nccl_world.h"

#include <stdio.h>
#include <string.h>

static void refuse(td_status status, const char *text)
{
    CHECK_FAILS(td_load_plugin("nccl"), status, text);
}

TEST(a_library_that_is_missing)
{
    nccl_choose(NULL);
    setenv("TANDEM_NCCL_SO", "/nowhere/libnccl.so.2", 1);
    refuse(TD_ERR_UNSUPPORTED, "TANDEM_NCCL_SO=/nowhere/libnccl.so.2 cannot be loaded");
    td_plugin_info *plugins; /* `tdrun doctor` takes this for no defect */
    int count;
    CHECK_OK(td_list_plugins(true, &plugins, &count));
    for (int i = 0; i < count; i++)
        if (!strcmp(plugins[i].name, "nccl"))
            CHECK_EQ(plugins[i].status, TD_ERR_UNSUPPORTED);
    td_free_plugin_list(plugins);
    CHECK_FAILS(td_init_process_group(&(td_init_options){.backend = "nccl"}), TD_ERR_UNSUPPORTED,
                "/nowhere/libnccl.so.2");
}

TEST(a_library_that_is_too_old)
{
    nccl_choose(NULL);
    setenv("FAKE_NCCL_VERSION", "21300", 1);
    refuse(TD_ERR_UNSUPPORTED, "NCCL 2.13.0 (");
    CHECK_CONTAINS(td_last_error(), "fake_nccl.so) is too old; it needs NCCL 2.14 or newer");
    setenv("FAKE_NCCL_VERSION", "2708", 1);
    refuse(TD_ERR_UNSUPPORTED, "NCCL 2.7.8 (");
    setenv("FAKE_NCCL_VERSION", "21400", 1); /* a failure is not remembered */
    CHECK_OK(td_load_plugin("nccl"));
}

TEST(a_library_that_lacks_a_function)
{
    nccl_choose("blocking");
    refuse(TD_ERR_INVALID, "fake_nccl_blocking.so) has no ncclCommInitRankConfig()");
}

TEST(a_file_that_is_another_library)
{
    nccl_choose(NULL);
    setenv("TANDEM_NCCL_SO", TD_TEST_BUILD_DIR "/tests/plugins/plain/tandem_plain.so", 1);
    refuse(TD_ERR_INVALID, "tandem_plain.so is not NCCL: it has no ncclGetVersion()");
}

TEST(a_file_that_is_no_library)
{
    char path[600];
    nccl_choose(NULL);
    snprintf(path, sizeof path, "%s/libnccl.so.2", td_test_temp_dir());
    FILE *file = fopen(path, "w");
    CHECK(file);
    fputs("not a library\n", file);
    fclose(file);
    setenv("TANDEM_NCCL_SO", path, 1);
    refuse(TD_ERR_UNSUPPORTED, "cannot be loaded");
}
