/* What all ranks exchange: the size of the batch at the beginning of a step, and how it went at the end. */
#include "parallel/pipeline_internal.h"

#include "base/clock.h"
#include "base/fail.h"
#include "group/process_group.h"

#include <tandem/dist.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RECORD = sizeof(struct td__pipeline_record) / sizeof(int64_t) };

static int world_rank(const td_pipeline *pipeline, int rank)
{
    return td_get_global_rank(pipeline->control, rank);
}

/* The messages of a pipeline have tags, and receives are started before the sends of the same rank: a backend that
 * enqueues its messages on a stream, in one order for both sides, cannot do that. So tensors of devices go through the
 * built-in one, whatever the world has for their kind; then stages on different kinds can be neighbours, too. */
static td_status make_messages(td_pipeline *pipeline, td_group **group)
{
    const char *host = pipeline->control->host.name;
    char backend[64];
    snprintf(backend, sizeof backend, "cpu:%s,*:%s", host, strcmp(host, "tcp") ? "native" : "tcp");
    return td_group_split(pipeline->control, 0, pipeline->rank,
                          &(td_group_options){.backend = backend}, group);
}

td_status td__pipeline_make_groups(td_pipeline *pipeline, td_group *group)
{
    pipeline->records = calloc((size_t)pipeline->plan.ranks, sizeof *pipeline->records);
    if (!pipeline->records)
        return td__fail_nomem("td_pipeline_create");
    TD_TRY(td_group_split(group, 0, pipeline->rank, NULL, &pipeline->control));
    return make_messages(pipeline, &pipeline->messages);
}

/* After an abort. Without the new group every later step is TD_ERR_STATE. */
static void replace_messages(td_pipeline *pipeline)
{
    td_group *fresh = NULL;
    make_messages(pipeline, &fresh);
    td_group_destroy(pipeline->messages);
    pipeline->messages = fresh;
}

/* The rank whose failure is reported: the first that has not only been aborted by another. -1: all succeeded. */
static int first_failure(const struct td__pipeline_record *records, int count)
{
    int found = -1;
    for (int r = 0; r < count; r++)
        if (records[r].status && (found < 0 || (records[found].status == TD_ERR_ABORTED &&
                                                records[r].status != TD_ERR_ABORTED)))
            found = r;
    return found;
}

/* All ranks fail with the status and text of rank `failed`, which has them in `error`. */
static td_status report(td_pipeline *pipeline, const char *call,
                        const struct td__pipeline_record *records, int failed,
                        const struct td__error *error)
{
    bool is_own = failed == pipeline->rank;
    td_bytes text = {0};
    if (is_own)
        text = (td_bytes){.data = (char *)error->text, .size = strlen(error->text)};
    td_status status = td_broadcast_object_list(&text, 1, world_rank(pipeline, failed),
                                                pipeline->control);
    if (status)
        return td_fail(status, "%s: %s", call, td__error_text());
    status = td_fail((td_status)records[failed].status, "%s: rank %d: %.*s", call,
                     world_rank(pipeline, failed), (int)text.size, text.data);
    if (!is_own)
        td_bytes_free(&text);
    return status;
}

/* All ranks exchange their records; a failure of any rank is one of all, with its text. `status` is that of this rank,
 * and its text is the last error. */
static td_status exchange(td_pipeline *pipeline, const char *call, td_status status,
                          struct td__pipeline_record *mine)
{
    struct td__pipeline_record *all = pipeline->records;
    struct td__error error;
    td__error_save(&error);
    mine->status = status;
    td_status sent = td_group_all_gather(all, mine, RECORD, TD_I64, pipeline->control, NULL);
    if (sent)
        return td_fail(sent, "%s: %s", call, td__error_text());
    int failed = first_failure(all, pipeline->plan.ranks);
    return failed < 0 ? TD_OK : report(pipeline, call, all, failed, &error);
}

/* ---- Creating ----------------------------------------------------------------------------------- */

/* ", 2 ahead, sum_loss": the settings that are rarely used. */
static const char *further_settings(const int64_t *numbers, char *text, size_t room)
{
    int length = numbers[3] ? snprintf(text, room, ", %d ahead", (int)numbers[3]) : 0;
    snprintf(text + length, room - (size_t)length, "%s", numbers[1] % 2 ? ", sum_loss" : "");
    return text;
}

static td_status compare(const td_pipeline *pipeline, const struct td__pipeline_record *all)
{
    for (int r = 1; r < pipeline->plan.ranks; r++) {
        const int64_t *first = all[0].numbers, *other = all[r].numbers;
        char of_first[64], of_other[64];
        if (!memcmp(first, other, sizeof all[0].numbers))
            continue;
        return td_fail(
            TD_ERR_MISMATCH,
            "td_pipeline_create: rank %d has %d modules, schedule %s, %d micro-batches%s; rank %d "
            "has %d, %s, %d%s; all ranks must pass the same",
            world_rank(pipeline, 0), (int)first[0],
            td__pipeline_kind_name((td_pipeline_schedule)(first[1] / 2)), (int)first[2],
            further_settings(first, of_first, sizeof of_first), world_rank(pipeline, r),
            (int)other[0], td__pipeline_kind_name((td_pipeline_schedule)(other[1] / 2)),
            (int)other[2], further_settings(other, of_other, sizeof of_other));
    }
    return TD_OK;
}

td_status td__pipeline_compare(td_pipeline *pipeline, td_status status)
{
    if (!pipeline->control)
        return status;
    struct td__pipeline_record mine = {
        .numbers = {pipeline->plan.chunks, 2 * (int)pipeline->plan.kind + pipeline->sum_loss,
                    pipeline->plan.micro_batches, pipeline->plan.ahead}};
    status = exchange(pipeline, "td_pipeline_create", status, &mine);
    if (!status)
        status = compare(pipeline, pipeline->records);
    return status;
}

/* ---- A step ------------------------------------------------------------------------------------- */

static const char *name_of(int64_t training)
{
    return training ? "td_pipeline_step" : "td_pipeline_forward";
}

td_status td__pipeline_begin(td_pipeline *pipeline, td_status status)
{
    struct td__pipeline_step *step = &pipeline->step;
    if (pipeline->control) {
        int64_t announced[2] = {step->training, status ? 0 : step->samples};
        struct td__error error;
        td__error_save(&error);
        TD_TRY(td_group_broadcast(announced, 2, TD_I64, world_rank(pipeline, 0), pipeline->control,
                                  NULL));
        if (!status && announced[0] != step->training)
            status = td_fail(TD_ERR_MISMATCH,
                             "rank %d called %s, rank %d %s; all ranks must make the same calls",
                             world_rank(pipeline, 0), name_of(announced[0]),
                             world_rank(pipeline, pipeline->rank), name_of(step->training));
        else if (!status && !announced[1])
            status = td_fail(TD_ERR_ABORTED, "rank %d has failed", world_rank(pipeline, 0));
        else if (status)
            td__error_restore(&error);
        step->samples = announced[1];
    }
    step->started_ns = td__now_ns();
    return status;
}

static void set_stats(td_pipeline *pipeline, const struct td__pipeline_record *all)
{
    int ranks = pipeline->plan.ranks;
    int64_t busy = 0, total = 1;
    for (int r = 0; r < ranks; r++) {
        busy += all[r].numbers[0];
        total = all[r].numbers[1] > total ? all[r].numbers[1] : total;
    }
    memcpy(&pipeline->step.loss, &all[ranks - 1].numbers[2], sizeof(double));
    if (!pipeline->step.training)
        return;
    pipeline->traced = true;
    pipeline->stats.steps++;
    pipeline->stats.busy_ns = pipeline->step.busy_ns;
    pipeline->stats.total_ns = total;
    pipeline->stats.bubble = 1 - (double)busy / ((double)total * ranks);
}

td_status td__pipeline_end(td_pipeline *pipeline, td_status status)
{
    const char *call = pipeline->step.call;
    struct td__pipeline_record mine = {
        .numbers = {pipeline->step.busy_ns, td__now_ns() - pipeline->step.started_ns}};
    memcpy(&mine.numbers[2], &pipeline->step.loss, sizeof(double));
    if (!pipeline->control) {
        if (status)
            return td_fail(status, "%s: %s", call, td__error_text());
        set_stats(pipeline, &mine);
        return TD_OK;
    }
    if (status && pipeline->messages)
        td_group_abort(pipeline->messages); /* leaves the last error as it is */
    status = exchange(pipeline, call, status, &mine);
    if (!status) {
        set_stats(pipeline, pipeline->records);
    } else {
        struct td__error error;
        td__error_save(&error);
        replace_messages(pipeline);
        td__error_restore(&error);
    }
    return status;
}
