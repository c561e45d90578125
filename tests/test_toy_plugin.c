/* The toy accelerator as a plug-in, found by the name of its device. */
#include "runner.h"

#include <tandem/device.h>
#include <tandem/ops.h>

#include <string.h>

static void search(void)
{
    setenv("TANDEM_PLUGIN_PATH", TD_TEST_BUILD_DIR "/tests/plugins/toy", 1);
}

TEST(a_device_loads_its_plugin)
{
    search();
    CHECK_EQ(td_device_count("toy"), 2);
    CHECK(td_device_exists("toy:1"));
    CHECK(!td_device_exists("toy:2"));
    TD_SCOPE;
    td_tensor *here = td_full(TD_SHAPE(3, 3), 1.5, TD_F32, NULL);
    td_tensor *there = td_tensor_to(here, td_device_get("toy:1"));
    td_tensor *product = td_tensor_to(td_matmul(there, there), td_device_get("cpu"));
    if (!product)
        FAIL("%s", td_last_error());
    CHECK(td_equal(product, td_matmul(here, here)));
}

TEST(variables_set_the_memory)
{
    search();
    setenv("TANDEM_TOY_MEMORY", "4194304", 1);
    setenv("TANDEM_TOY_DELAY_US", "0", 1);
    TD_SCOPE;
    CHECK(td_zeros(TD_SHAPE(100), TD_F32, td_device_get("toy:0")));
    td_memory_stats stats;
    CHECK_OK(td_device_memory_stats(td_device_get("toy:0"), &stats));
    CHECK_EQ(stats.total, 4194304);
}

TEST(a_wrong_variable_is_named)
{
    search();
    setenv("TANDEM_TOY_DELAY_US", "soon", 1);
    TD_SCOPE;
    CHECK(!td_zeros(TD_SHAPE(100), TD_F32, td_device_get("toy:0")));
    CHECK_CONTAINS(td_last_error(), "TANDEM_TOY_DELAY_US=soon");
}
