/* Excluding a rank, and how long one has been silent; see peer/exclusion.c and peer/pulse.c.
 *
 * The endpoint has the exclusion; here the groups of this rank that have the excluded rank are broken, at once, where
 * the failure detector would do so a moment later. */
#include "base/fail.h"
#include "group/root.h"

static td_status check_rank(const td_group *group, const char *what, int rank)
{
    const struct td__root *root = group->root;
    if (rank < 0 || rank >= root->size)
        return td_fail(TD_ERR_INVALID, "%s: rank %d is out of range; ranks are 0 to %d", what, rank,
                       root->size - 1);
    return TD_OK;
}

static td_status exclude(td_group *group, int rank, const char *reason)
{
    static const char *const what = "td_group_exclude";
    struct td__root *root = group->root;
    TD_TRY(check_rank(group, what, rank));
    if (rank == root->rank)
        return td_fail(TD_ERR_INVALID,
                       "%s: rank %d is this rank, which leaves by td_destroy_process_group()", what,
                       rank);
    struct td__error error;
    td__error_save(&error);
    td_status status = td__endpoint_exclude(root->endpoint, rank,
                                            reason && *reason ? reason : "it has given no reason");
    if (status)
        status = td_fail(status, "%s on group \"%s\": %s", what, group->name, td__error_text());
    else
        td__error_undo(&error);
    td__abort_excluded(root);
    return status;
}

td_status td_group_exclude(td_group *group, int rank, const char *reason)
{
    group = td__group_enter(group, "td_group_exclude");
    if (!group)
        return TD_ERR_STATE;
    td__group_use(group);
    td_status status = exclude(group, rank, reason);
    td__group_unuse(group);
    return status;
}

static td_status find_silence(const td_group *group, int rank, int64_t *silence_ms)
{
    static const char *const what = "td_group_silence";
    struct td__endpoint *endpoint = group->root->endpoint;
    TD_TRY(check_rank(group, what, rank));
    int64_t silence = td__endpoint_silence_ms(endpoint, rank);
    const char *exit_reason = rank == group->root->rank ? NULL
                                                        : td__endpoint_exit_reason(endpoint, rank);
    if (exit_reason)
        return td_fail(TD_ERR_PEER, "%s on group \"%s\": %s %s", what, group->name,
                       td__endpoint_describe(endpoint, rank), exit_reason);
    *silence_ms = silence;
    return TD_OK;
}

td_status td_group_silence(td_group *group, int rank, int64_t *silence_ms)
{
    group = td__group_enter(group, "td_group_silence");
    if (!group)
        return TD_ERR_STATE;
    if (!silence_ms)
        return td_fail(TD_ERR_INVALID, "td_group_silence: the result is NULL");
    td__group_use(group);
    td_status status = find_silence(group, rank, silence_ms);
    td__group_unuse(group);
    return status;
}
