/* Post-local SGD: gradients are averaged over the whole group at first, later only in a subgroup
 * (or not at all), while an averager averages the parameters of all ranks periodically. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "group/process_group.h"
#include "group/root.h"
#include "parallel/buckets.h"
#include "peer/endpoint.h"

#include <stdlib.h>

/* ---- The hook -------------------------------------------------------------------------------------------- */

struct td_post_local {
    td_post_local_options options;
    int64_t step;
    bool owns_subgroup;
};

static void free_work(void *data)
{
    td_work *work = data;
    td_work_wait(work, 0);
    td_work_release(work);
}

/* Creates a group for the ranks of each host. All ranks call it in the same pass, at its first
 * bucket. */
static td_status make_subgroup(struct td_post_local *post, td_group *group)
{
    const struct td__root *root = td__root_enter(group, "td_post_local_create");
    if (!root)
        return TD_ERR_STATE;
    int host = td__endpoint_host(root->endpoint, root->rank);
    TD_TRY(td_group_split(group, host, 0, NULL, &post->options.subgroup));
    post->owns_subgroup = true;
    return TD_OK;
}

static td_status start(td_bucket *bucket, void *arg)
{
    struct td_post_local *post = arg;
    bool local = post->step >= post->options.start_step;
    td_bucket_set_data(bucket, NULL, free_work); /* of a pass that failed */
    if (local && post->options.no_local_all_reduce)
        return TD_OK;
    if (local && !post->options.subgroup)
        TD_TRY(make_subgroup(post, td_bucket_group(bucket)));
    td_tensor *buffer = td_bucket_buffer(bucket);
    td_work *work = NULL;
    TD_TRY(td_all_reduce(buffer, TD_AVG, local ? post->options.subgroup : td_bucket_group(bucket),
                         &work));
    td_bucket_count_sent(bucket, td_tensor_nbytes(buffer));
    td_bucket_set_data(bucket, work, free_work);
    return TD_OK;
}

static td_status finish(td_bucket *bucket, void *arg)
{
    struct td_post_local *post = arg;
    if (td_bucket_is_last(bucket))
        post->step++;
    td_work *work = td_bucket_data(bucket);
    if (!work)
        return TD_OK;
    td_status status = td_work_wait(work, 0);
    td_bucket_set_data(bucket, NULL, free_work);
    return status;
}

td_post_local *td_post_local_create(const td_post_local_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_post_local *post = calloc(1, sizeof *post);
    if (!post) {
        td__fail_nomem("td_post_local_create");
        return NULL;
    }
    if (options)
        post->options = *options;
    return post;
}

void td_post_local_destroy(td_post_local *post)
{
    if (post && post->owns_subgroup)
        td_group_destroy(post->options.subgroup);
    free(post);
}

td_comm_hook td_post_local_hook(td_post_local *post)
{
    return (td_comm_hook){.name = "post_local", .start = start, .finish = finish, .arg = post};
}

/* ---- The averager ---------------------------------------------------------------------------------------- */

struct td_periodic_averager {
    td_periodic_averager_options options;
    int64_t step;
    int count;
    td_tensor *parameters[]; /* retained */
};

td_periodic_averager *td_periodic_averager_create(td_module *module,
                                                  const td_periodic_averager_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_periodic_averager_options with = options ? *options : (td_periodic_averager_options){0};
    if (!module || with.period < 1 || with.warmup_steps < 0) {
        td_fail(TD_ERR_INVALID,
                "td_periodic_averager_create: the module is %s, the period %lld, the warm-up "
                "%lld; the period must be at least 1, the warm-up at least 0",
                module ? "there" : "NULL", (long long)with.period, (long long)with.warmup_steps);
        return NULL;
    }
    td_state *parameters = td_module_parameters(module);
    if (!parameters)
        return NULL;
    int count = td_state_count(parameters);
    td_periodic_averager *averager =
        calloc(1, sizeof *averager + (size_t)count * sizeof averager->parameters[0]);
    if (averager) {
        averager->options = with;
        averager->count = count;
        for (int i = 0; i < count; i++)
            averager->parameters[i] = td_tensor_retain(td_state_tensor(parameters, i));
    } else {
        td__fail_nomem("td_periodic_averager_create");
    }
    td_state_destroy(parameters);
    return averager;
}

td_status td_periodic_averager_step(td_periodic_averager *averager)
{
    if (!averager)
        return td__fail_null("td_periodic_averager_step");
    int64_t past = averager->step++ - averager->options.warmup_steps;
    if (past < 0 || past % averager->options.period || !averager->count)
        return TD_OK;
    TD_TRY(td_all_reduce_coalesced(averager->parameters, averager->count, TD_AVG,
                                   averager->options.group, NULL));
    for (int i = 0; i < averager->count; i++)
        td__tensor_bump_version(averager->parameters[i]);
    return TD_OK;
}

void td_periodic_averager_destroy(td_periodic_averager *averager)
{
    if (!averager)
        return;
    for (int i = 0; i < averager->count; i++)
        td_tensor_release(averager->parameters[i]);
    free(averager);
}
