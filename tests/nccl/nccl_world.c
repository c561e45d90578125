/* Worlds of the backend nccl; see nccl_world.h. */
#include "nccl_world.h"

#include "toy_machine.h"

#include <dlfcn.h>
#include <string.h>

static void *fake;

/* ---- The device, for the fake ----------------------------------------------------------------------- */

static void *hold(const void *data, size_t bytes)
{
    struct toy_span *span = malloc(sizeof *span);
    *span = toy_span_on(td_device_self(nccl_device()), data, bytes, "nccl");
    return span;
}

static void *reach(void *held)
{
    return toy_span_reach(held, "nccl");
}

static td_status enqueue(void *stream, td_status (*run)(void *), void (*drop)(void *), void *arg)
{
    struct toy_job *job = toy_job_create(TOY_COPY, "nccl", run, &arg, sizeof arg);
    job->drop = drop;
    return toy_enqueue(td_device_self(nccl_device()), stream, job);
}

static const struct fake_device device = {hold, reach, free, enqueue};

/* ---- Worlds -------------------------------------------------------------------------------------------- */

td_device *nccl_device(void)
{
    return td_device_get(nccl_is_real() ? getenv("NCCL_TEST_DEVICE") : "toy:0");
}

bool nccl_is_real(void)
{
    return getenv("NCCL_TEST_DEVICE") != NULL;
}

void nccl_needs_fake(void)
{
    if (nccl_is_real())
        td_test_skip("it needs the fake NCCL");
}

double nccl_item(td_tensor *x, int64_t index)
{
    TD_SCOPE;
    return td_item(td_select(x, 0, index));
}

double nccl_sum(td_tensor *x)
{
    TD_SCOPE;
    return td_item(td_sum(x));
}

const char *nccl_backends(void)
{
    return nccl_is_real() ? "cpu:native,cuda:nccl" : "cpu:native,toy:nccl";
}

/* All ranks on one GPU: NCCL must take them for ranks of several hosts. */
static void prepare_real(void)
{
    char rank[16];
    const char *library = getenv("NCCL_TEST_SO");
    snprintf(rank, sizeof rank, "%d", td_test_rank());
    setenv("NCCL_HOSTID", rank, 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    setenv("TANDEM_PLUGIN_PATH", TD_TEST_BUILD_DIR "/lib/tandem/plugins", 0);
    if (library && *library)
        setenv("TANDEM_NCCL_SO", library, 1);
    CHECK_OK(td_load_plugin("cuda"));
}

void nccl_choose(const char *variant)
{
    char path[512];
    nccl_needs_fake();
    snprintf(path, sizeof path, TD_TEST_BUILD_DIR "/tests/nccl/fake_nccl%s%s.so",
             variant ? "_" : "", variant ? variant : "");
    setenv("TANDEM_NCCL_SO", path, 1);
    setenv("TANDEM_NCCL_KIND", "toy", 1);
    setenv("TANDEM_PLUGIN_PATH", TD_TEST_BUILD_DIR "/lib/tandem/plugins", 0);
    setenv("FAKE_NCCL_DIR", td_test_temp_dir(), 1);
}

void nccl_prepare(void)
{
    if (nccl_is_real()) {
        prepare_real();
        return;
    }
    if (!getenv("TANDEM_NCCL_SO"))
        nccl_choose(NULL);
    CHECK_OK(toy_register());
    toy_set_delay(20);
    fake = dlopen(getenv("TANDEM_NCCL_SO"), RTLD_NOW | RTLD_LOCAL);
    CHECK(fake);
    ((fake_use_fn *)dlsym(fake, "fake_nccl_use"))(&device);
}

void nccl_load(void)
{
    nccl_prepare();
    CHECK_OK(td_load_plugin("nccl"));
}

void nccl_begin(int64_t timeout_ms)
{
    nccl_load();
    CHECK_OK(td_init_process_group(
        &(td_init_options){.backend = nccl_backends(), .timeout_ms = timeout_ms}));
}

int nccl_fake_live(void)
{
    return fake ? ((fake_live_fn *)dlsym(fake, "fake_nccl_live"))() : 0;
}

void nccl_fake_fail(int result)
{
    ((fake_fail_fn *)dlsym(fake, "fake_nccl_fail"))(result);
}

void nccl_end(void)
{
    CHECK_OK(td_destroy_process_group());
    CHECK_OK(td_device_synchronize(nccl_device()));
    CHECK_SOON(nccl_fake_live() ==
               0); /* the last jobs of the streams are dropped behind their events */
}
