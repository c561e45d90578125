/* DistributedDataParallel over the backend nccl: the steps of the host, and a host that does not wait for the device. */
#include "nccl_world.h"

enum { STEPS = 4 };

static td_module *make_model(td_device *device)
{
    td_manual_seed(3);
    TD_DEVICE_SCOPE(td_device_get("cpu"));
    td_module *net = td_sequential(td_linear(12, 400), td_relu(), td_linear(400, 400), td_relu(),
                                   td_linear(400, 400), td_linear(400, 4), NULL);
    CHECK_OK(td_module_to(net, device));
    td_module *model = td_ddp(net, &(td_ddp_options){.bucket_cap_mb = 0.001});
    CHECK(model);
    return model;
}

/* A rank has other inputs in each step. */
static td_tensor *make_input(int step)
{
    td_tensor *x = td_empty(TD_SHAPE(6, 12), TD_F32, NULL);
    float *data = td_tensor_data(x);
    for (int i = 0; i < 72; i++)
        data[i] = (float)((i * 7 + step * 5 + td_get_rank(NULL) * 11) % 13) / 6 - 1;
    return x;
}

static void train_step(td_module *model, td_optimizer *optimizer, td_tensor *input)
{
    TD_SCOPE;
    CHECK_OK(td_optimizer_zero_grad(optimizer));
    CHECK_OK(td_backward(td_mean(td_square(td_forward(model, input)))));
    CHECK_OK(td_optimizer_step(optimizer));
}

static void check_close(td_module *a, td_module *b)
{
    td_state *x = td_module_state(a), *y = td_module_state(b);
    for (int i = 0; i < td_state_count(x); i++) {
        TD_SCOPE;
        td_tensor *u = td_tensor_to(td_state_tensor(x, i), td_device_get("cpu"));
        CHECK(td_allclose(u, td_state_tensor(y, i), 1e-4, 1e-6));
    }
    td_state_destroy(x);
    td_state_destroy(y);
}

struct pair {
    td_module *here, *host;
    td_optimizer *here_optimizer, *host_optimizer;
};

static struct pair begin_pair(void)
{
    struct pair pair = {.here = make_model(nccl_device()),
                        .host = make_model(td_device_get("cpu"))};
    pair.here_optimizer = td_sgd(pair.here, &(td_sgd_options){.lr = 0.1, .momentum = 0.5});
    pair.host_optimizer = td_sgd(pair.host, &(td_sgd_options){.lr = 0.1, .momentum = 0.5});
    CHECK(pair.here_optimizer && pair.host_optimizer);
    return pair;
}

static void end_pair(struct pair *pair)
{
    check_close(pair->here, pair->host);
    td_optimizer_destroy(pair->here_optimizer);
    td_optimizer_destroy(pair->host_optimizer);
    td_module_destroy(pair->here);
    td_module_destroy(pair->host);
}

RANKS(ddp_makes_the_steps_of_the_host, .ranks = 2, .deadline_s = 60)
{
    nccl_begin(60000);
    struct pair pair = begin_pair();
    td_ddp_stats stats;
    for (int step = 0; step < STEPS; step++) {
        TD_SCOPE;
        td_tensor *x = make_input(step), *y = td_tensor_to(x, nccl_device());
        int64_t waits = td_device_waits(nccl_device());
        train_step(pair.here, pair.here_optimizer, y);
        if (step > 1) /* the first ones prepare buckets and kernels */
            CHECK_EQ(td_device_waits(nccl_device()), waits);
        train_step(pair.host, pair.host_optimizer, x);
    }
    CHECK_OK(td_ddp_get_stats(pair.here, &stats));
    CHECK(stats.buckets > 1);
    end_pair(&pair);
    nccl_end();
}

/* Whole steps are enqueued while the device of this rank runs nothing. */
RANKS(ddp_does_not_wait_for_the_device, .ranks = 2, .deadline_s = 60)
{
    nccl_needs_fake();
    nccl_begin(60000);
    struct pair pair = begin_pair();
    for (int step = 0; step < 2; step++) {
        TD_SCOPE;
        td_tensor *x = make_input(step);
        train_step(pair.here, pair.here_optimizer, td_tensor_to(x, nccl_device()));
        train_step(pair.host, pair.host_optimizer, x);
    }
    {
        TD_SCOPE;
        td_tensor *x = make_input(2), *y = td_tensor_to(x, nccl_device());
        td_event *end = td_event_create(nccl_device(), NULL);
        toy_hold(0, true);
        for (int i = 0; i < 2; i++)
            train_step(pair.here, pair.here_optimizer, y);
        CHECK_OK(td_event_record(end, NULL));
        CHECK(!td_event_is_done(end));
        toy_hold(0, false);
        for (int i = 0; i < 2; i++)
            train_step(pair.host, pair.host_optimizer, x);
        td_event_destroy(end);
    }
    end_pair(&pair);
    nccl_end();
}
