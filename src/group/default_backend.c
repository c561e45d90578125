/* The backend of a kind of devices for groups that have not chosen one:
 *
 *     the backend that was registered last and names the kind
 *     cuda: "nccl", whose plug-in is loaded by the first call on memory of CUDA, if it is there and can be
 *     "native", by way of the host
 *
 * What the ranks have may differ, and a backend would then wait for ranks that use another one. A call has too few ranks
 * for a meeting of all, so the first rank of the world that needs the kind writes its backend into the store. A later
 * one that has another backend fails, with both, and aborts the group, so that no rank waits for it. */
#include "base/fail.h"
#include "device/device_internal.h"
#include "group/process_group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REASON = 600 };

/* TANDEM_NCCL_KIND is for tests, as in plugins/nccl. */
static const char *plugin_of(const char *kind)
{
    const char *tested = secure_getenv("TANDEM_NCCL_KIND");
    return !strcmp(kind, tested && *tested ? tested : "cuda") ? "nccl" : NULL;
}

/* `reason`: why there is no better one; "" if there is nothing better. */
static td_status find_local(const td_group *group, const char *kind,
                            struct td__backend_found *found, char reason[REASON])
{
    static atomic_flag logged = ATOMIC_FLAG_INIT;
    const char *plugin = plugin_of(kind);
    struct td__error before;
    reason[0] = '\0';
    if (td__backend_for_kind(kind, found))
        return TD_OK;
    td__error_save(&before);
    if (plugin && !td__backend_find(plugin, found) && td__backend_takes(found->ops, kind))
        return TD_OK;
    if (plugin)
        snprintf(reason, REASON, "%s", td__error_text());
    td__error_undo(&before);
    TD_TRY(td__backend_find("native", found));
    if (plugin && group->size > 1 && !atomic_flag_test_and_set(&logged))
        td_log(TD_LOG_WARN,
               "group \"%s\": calls on memory of %s go by way of the host, since backend \"%s\" "
               "cannot be used: %s",
               group->name, kind, plugin, reason);
    return TD_OK;
}

/* "3 native there is no backend …": a rank, its backend, and why it has no better one. */
struct entry {
    int rank;
    char backend[32], reason[REASON];
};

static bool read_entry(const td_bytes *value, struct entry *entry)
{
    char text[64 + REASON];
    int at = 0;
    snprintf(text, sizeof text, "%.*s", (int)value->size, (const char *)value->data);
    entry->reason[0] = '\0';
    if (sscanf(text, "%d %31s %n", &entry->rank, entry->backend, &at) != 2)
        return false;
    snprintf(entry->reason, REASON, "%s", at ? text + at : "");
    return true;
}

static td_status fail_other(const struct td__root *root, const char *kind,
                            const struct td__backend_found *found, const char *reason,
                            const struct entry *other)
{
    const char *why = *reason ? reason : other->reason;
    return td_fail(
        TD_ERR_MISMATCH,
        "rank %d has backend \"%s\" for %s, but rank %d has \"%s\"%s%s%s; give all ranks "
        "the same backends, or choose one in the options of the group",
        root->rank, found->name, kind, other->rank, other->backend, *why ? " (" : "", why,
        *why ? ")" : "");
}

/* The native backend can do without the store. */
static td_status agree(struct td__root *root, const char *kind,
                       const struct td__backend_found *found, const char *reason, int *other_rank)
{
    char key[256], mark[TD__KIND_NAME + 2], own[64 + REASON];
    struct entry other;
    td_bytes value = {0};
    snprintf(mark, sizeof mark, "<%s>", kind);
    pthread_mutex_lock(&root->lock);
    bool agreed = root->size == 1 || strstr(root->agreed, mark);
    pthread_mutex_unlock(&root->lock);
    if (agreed)
        return TD_OK;
    snprintf(key, sizeof key, "\1kind/%.140s/%lld/%s", root->name, (long long)root->epoch, kind);
    snprintf(own, sizeof own, "%d %s %s", root->rank, found->name, reason);
    td_status status = td_store_compare_set(root->store, key, "", 0, own, strlen(own), &value);
    if (status)
        return found->built_in ? TD_OK : status;
    if (!read_entry(&value, &other)) {
        status = td_fail(TD_ERR_MISMATCH, "the store has no backend under \"%s\"", key + 1);
    } else if (strcmp(other.backend, found->name) != 0) {
        *other_rank = other.rank;
        status = fail_other(root, kind, found, reason, &other);
    }
    td_bytes_free(&value);
    pthread_mutex_lock(&root->lock);
    if (!status && strlen(root->agreed) + sizeof mark < sizeof root->agreed)
        strcat(root->agreed, mark);
    pthread_mutex_unlock(&root->lock);
    return status;
}

td_status td__default_backend(const td_group *group, const char *kind,
                              struct td__backend_found *found, int *other_rank)
{
    char reason[REASON];
    TD_TRY(find_local(group, kind, found, reason));
    return agree(group->root, kind, found, reason, other_rank);
}
