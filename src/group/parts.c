/* The backends of a group: one for host memory, and those of other kinds of devices.
 *
 *     chosen                  host        toy:0
 *     (nothing)               native      the backend registered for the kind; cuda: nccl if it is there; else native
 *     "mine"                  mine        mine, if it takes that kind
 *     "cpu:mine,toy:native"   mine        native
 *     "cpu:mine,*:native"     mine        native, as for every kind that is not in the list
 *
 * A kind that is named in a list is prepared when the group is created; others in the first call on their memory
 * (default_backend.c for groups that have chosen nothing). */
#include "base/fail.h"
#include "device/device_internal.h"
#include "group/process_group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHOICES_MOST = 16, BACKEND_NAME = 32 };

struct choice {
    char kind[TD__KIND_NAME]; /* "": every kind that the backend takes */
    char backend[BACKEND_NAME];
};

/* ---- Reading what was chosen -------------------------------------------------------------------- */

static td_status fail_list(const char *chosen, const char *why)
{
    return td_fail(TD_ERR_INVALID,
                   "\"%s\" is not a list of backends: %s; write one as \"cpu:native,cuda:nccl\"",
                   chosen, why);
}

/* One "kind:backend" of `length` bytes. */
static td_status read_choice(const char *chosen, const char *text, size_t length,
                             struct choice *choice)
{
    const char *colon = memchr(text, ':', length);
    size_t kind = colon ? (size_t)(colon - text) : 0, name = length - kind - (colon ? 1 : 0);
    if (!colon)
        return fail_list(chosen, length ? "an entry has no kind of device" : "an entry is empty");
    if (!kind || !name)
        return fail_list(chosen, kind ? "an entry has no backend" : "an entry has no kind");
    if (kind >= sizeof choice->kind || name >= sizeof choice->backend ||
        memchr(colon + 1, ':', name))
        return fail_list(chosen, "an entry is not a kind and a name");
    memcpy(choice->kind, text, kind);
    memcpy(choice->backend, colon + 1, name);
    return TD_OK;
}

/* The choices are cleared; *count is 0 for NULL. */
static td_status read_choices(const char *chosen, struct choice choices[CHOICES_MOST], int *count)
{
    *count = 0;
    if (!chosen)
        return TD_OK;
    if (!strchr(chosen, ':') && !strchr(chosen, ',')) {
        snprintf(choices[0].backend, BACKEND_NAME, "%s", chosen);
        *count = 1;
        return TD_OK;
    }
    for (const char *at = chosen;; at++) {
        size_t length = strcspn(at, ",");
        if (*count == CHOICES_MOST)
            return fail_list(chosen, "it has too many entries");
        struct choice *choice = &choices[(*count)++];
        TD_TRY(read_choice(chosen, at, length, choice));
        for (struct choice *other = choices; other < choice; other++)
            if (!strcmp(other->kind, choice->kind))
                return td_fail(TD_ERR_INVALID, "\"%s\" names the kind %s twice", chosen,
                               choice->kind);
        at += length;
        if (!*at)
            return TD_OK;
    }
}

/* What a backend takes, for errors: "cpu, cuda". */
static const char *kinds_text(const td_backend_ops *ops, char *text, size_t size)
{
    snprintf(text, size, "%s", ops->devices ? "" : "cpu");
    for (int i = 0; ops->devices && ops->devices[i]; i++)
        snprintf(text + strlen(text), size - strlen(text), "%s%s", i ? ", " : "", ops->devices[i]);
    return text;
}

/* The backend of a choice in a list. */
static td_status find_chosen(const char *chosen, const struct choice *choice,
                             struct td__backend_found *found)
{
    char kinds[128];
    if (strcmp(choice->kind, "cpu") != 0 && strcmp(choice->kind, "*") != 0 &&
        !td__find_kind(choice->kind))
        return td_fail(TD_ERR_INVALID, "backend \"%s\": %s", chosen, td__error_text());
    TD_TRY(td__backend_find(choice->backend, found));
    if (td__backend_takes(found->ops, choice->kind))
        return TD_OK;
    return td_fail(TD_ERR_INVALID,
                   "\"%s\": backend \"%s\" does not take memory of %s, but of %s; \"%s:native\" "
                   "takes any",
                   chosen, choice->backend, choice->kind,
                   kinds_text(found->ops, kinds, sizeof kinds), choice->kind);
}

/* The backend of host memory. */
static td_status find_host(const char *chosen, struct td__backend_found *found)
{
    struct choice choices[CHOICES_MOST] = {0};
    int count;
    TD_TRY(read_choices(chosen, choices, &count));
    for (int i = 0; i < count; i++) {
        if (choices[i].kind[0] && strcmp(choices[i].kind, "cpu") != 0)
            continue;
        if (choices[i].kind[0])
            return find_chosen(chosen, &choices[i], found);
        TD_TRY(td__backend_find(choices[i].backend, found));
        if (td__backend_takes(found->ops, "cpu"))
            return TD_OK;
    }
    return td__backend_find("native", found);
}

td_status td__backends_check(const char *chosen)
{
    struct choice choices[CHOICES_MOST] = {0};
    struct td__backend_found host, found;
    int count;
    TD_TRY(find_host(chosen, &host));
    TD_TRY(read_choices(chosen, choices, &count));
    for (int i = 0; i < count; i++) {
        if (!choices[i].kind[0])
            continue;
        TD_TRY(find_chosen(chosen, &choices[i], &found));
        if (found.ops == host.ops && found.built_in && strcmp(found.name, host.name) != 0)
            return td_fail(TD_ERR_INVALID,
                           "\"%s\": \"%s\" and \"%s\" are the same backend over other transports, "
                           "and a group has one of them; write \"cpu:%s,%s:%s\"",
                           chosen, host.name, found.name, host.name, choices[i].kind, host.name);
    }
    return TD_OK;
}

bool td__backends_have_tcp(const char *chosen)
{
    struct td__backend_found found;
    return chosen && !find_host(chosen, &found) && !strcmp(found.name, "tcp");
}

/* ---- Creating --------------------------------------------------------------------------------------- */

/* Opens the backend's part of the store, and creates what serves the group. */
static td_status open_part(td_group *group, struct td__part *part,
                           const struct td__backend_found *found, const char *options)
{
    char prefix[96];
    snprintf(prefix, sizeof prefix, "\1group/%016llx", (unsigned long long)group->key);
    if (part != &group->host)
        snprintf(prefix + strlen(prefix), sizeof prefix - strlen(prefix), "@%s", found->name);
    part->group = group;
    part->name = found->name;
    TD_TRY(td_prefix_store_open(prefix, group->root->store, &part->context.store));
    part->context.name = group->name;
    part->context.rank = group->rank;
    part->context.size = group->size;
    part->context.global_ranks = group->ranks;
    part->context.timeout_ms = group->timeout_ms;
    if (options && !(part->context.options = strdup(options)))
        return td__fail_nomem("group");
    if (found->ops->submit)
        TD_TRY(td__submits_begin(group));
    uint64_t failures = td__error_count();
    td_status status = found->ops->create(&part->context, found->arg, &part->self);
    if (status && td__error_count() == failures)
        td_fail(
            status,
            "group \"%s\": create() of backend \"%s\" failed with %s, and gave no reason by td_fail()",
            group->name, found->name, td_status_name(status));
    if (!status) {
        part->submits = found->ops->submit != NULL;
        part->watched = part->submits || found->ops->breaks_with_members;
        part->ops = found->ops;
    }
    return status;
}

static void free_part(struct td__part *part)
{
    struct td__part_streams *streams = atomic_load(&part->streams), *next;
    for (; streams; streams = next) {
        next = streams->next;
        for (int i = 0; i < TD__STREAMS; i++)
            td_stream_release(streams->streams[i]);
        free(streams);
    }
    td_store_close(part->context.store);
    free((char *)part->context.options);
}

/* The part of a backend, which is created unless there is one. The lock of the parts is held. */
static td_status need_part(td_group *group, const struct td__backend_found *found,
                           struct td__part **out)
{
    for (struct td__part *part = td__next_part(group, NULL); part;
         part = td__next_part(group, part))
        if (!strcmp(part->name, found->name)) {
            *out = part;
            return TD_OK;
        }
    struct td__part *part = calloc(1, sizeof *part);
    if (!part)
        return td__fail_nomem("group");
    td_status status = open_part(group, part, found, group->host.context.options);
    if (status) {
        free_part(part);
        free(part);
        return status;
    }
    part->next = atomic_load(&group->parts);
    atomic_store(&group->parts, part);
    bool broken = part->watched && atomic_load(&group->broken);
    if ((atomic_load(&group->aborted) || broken) && part->ops->abort) {
        td__group_state(group); /* the reason */
        part->ops->abort(part->self);
    }
    *out = part;
    return TD_OK;
}

/* The lock of the parts is held. */
static td_status add_kind(td_group *group, const char *kind, const struct td__backend_found *found)
{
    struct td__kind_part *entry = calloc(1, sizeof *entry);
    if (!entry)
        return td__fail_nomem("group");
    snprintf(entry->kind, sizeof entry->kind, "%s", kind);
    td_status status = need_part(group, found, &entry->part);
    if (status) {
        free(entry);
        return status;
    }
    entry->next = atomic_load(&group->kinds);
    atomic_store_explicit(&group->kinds, entry, memory_order_release);
    return TD_OK;
}

td_status td__parts_create(td_group *group, const char *chosen, const char *options)
{
    struct choice choices[CHOICES_MOST] = {0};
    struct td__backend_found host, found;
    int count;
    TD_TRY(td__backends_check(chosen));
    TD_TRY(find_host(chosen, &host));
    TD_TRY(read_choices(chosen, choices, &count));
    bool is_list = count && choices[0].kind[0];
    const char *shown = host.name;
    if (is_list)
        shown = chosen;
    else if (chosen && !td__backend_find(chosen, &found)) /* it may take no host memory */
        shown = found.name;
    group->chosen = chosen ? strdup(chosen) : NULL;
    group->backend = strdup(shown);
    if (!group->backend || (chosen && !group->chosen))
        return td__fail_nomem("group");
    TD_TRY(open_part(group, &group->host, &host, options));
    td_status status = TD_OK;
    pthread_mutex_lock(&group->parts_lock);
    for (int i = 0; i < count && is_list && !status; i++) {
        if (!strcmp(choices[i].kind, "cpu") || !strcmp(choices[i].kind, "*"))
            continue;
        status = find_chosen(chosen, &choices[i], &found);
        if (!status)
            status = add_kind(group, choices[i].kind, &found);
    }
    pthread_mutex_unlock(&group->parts_lock);
    return status;
}

void td__parts_destroy(td_group *group)
{
    for (struct td__part *part = atomic_load(&group->parts); part; part = part->next) {
        part->ops->destroy(part->self);
        part->ops = NULL;
    }
    if (group->host.ops)
        group->host.ops->destroy(group->host.self);
    group->host.ops = NULL;
    td__submits_end(group);
}

void td__parts_free(td_group *group)
{
    struct td__part *part = atomic_exchange(&group->parts, NULL), *next;
    struct td__kind_part *kind = atomic_exchange(&group->kinds, NULL), *next_kind;
    for (; part; part = next) {
        next = part->next;
        if (part->ops)
            part->ops->destroy(part->self);
        free_part(part);
        free(part);
    }
    for (; kind; kind = next_kind) {
        next_kind = kind->next;
        free(kind);
    }
    if (group->host.ops)
        group->host.ops->destroy(group->host.self);
    free_part(&group->host);
    group->host = (struct td__part){0};
    td__submits_end(group);
}

/* ---- A call on a device ---------------------------------------------------------------------------------- */

static td_status fail_kind(const td_group *group, const td_call *call)
{
    const char *kind = td_device_kind(call->device);
    return td_fail(TD_ERR_INVALID,
                   "%s: the tensor is on %s, but no backend of group \"%s\" takes memory of the "
                   "kind %s; its backend is \"%s\", and \"cpu:%s,%s:native\" would take it",
                   td_op_kind_name(call->kind), td_device_name(call->device), group->name, kind,
                   group->backend, group->host.name, kind);
}

/* The backend of a kind that a list does not name. */
static td_status find_other(td_group *group, const td_call *call, struct td__backend_found *found)
{
    struct choice choices[CHOICES_MOST] = {0};
    int count;
    TD_TRY(read_choices(group->chosen, choices, &count));
    for (int i = 0; i < count; i++)
        if (!strcmp(choices[i].kind, "*"))
            return find_chosen(group->chosen, &choices[i], found);
    return fail_kind(group, call);
}

/* The backend of a kind in its first call. *other: a rank that has another default. */
static td_status find_for_kind(td_group *group, const td_call *call, const char *kind,
                               struct td__backend_found *found, int *other)
{
    if (!group->chosen)
        return td__default_backend(group, kind, found, other);
    if (strchr(group->chosen, ':'))
        return find_other(group, call, found);
    TD_TRY(td__backend_find(group->chosen, found));
    return td__backend_takes(found->ops, kind) ? TD_OK : fail_kind(group, call);
}

struct td__part *td__part_of_device(td_group *group, const td_device *device)
{
    struct td__kind_part *kind = atomic_load_explicit(&group->kinds, memory_order_acquire);
    while (kind && strcmp(kind->kind, device->kind_name) != 0)
        kind = kind->next;
    return kind ? kind->part : NULL;
}

static struct td__part_streams *streams_of(struct td__part *part, const td_device *device, int lane)
{
    struct td__part_streams *streams = atomic_load_explicit(&part->streams, memory_order_acquire);
    while (streams && (streams->device != device || streams->lane != lane))
        streams = streams->next;
    return streams;
}

/* The lock of the parts is held. */
static struct td__part_streams *add_streams(struct td__part *part, td_device *device, int lane)
{
    struct td__part_streams *streams = calloc(1, sizeof *streams);
    if (!streams) {
        td__fail_nomem("group");
        return NULL;
    }
    streams->device = device;
    streams->lane = lane;
    for (int i = 0; i < TD__STREAMS; i++) {
        if (lane && i != TD__STREAM_MESSAGES)
            continue;
        if ((streams->streams[i] = td_stream_create(device, 0)))
            continue;
        while (i-- > 0)
            td_stream_release(streams->streams[i]);
        free(streams);
        return NULL;
    }
    streams->next = atomic_load(&part->streams);
    atomic_store_explicit(&part->streams, streams, memory_order_release);
    return streams;
}

static td_stream *stream_in_lane(struct td__part *part, td_device *device,
                                 enum td__part_stream which, int lane)
{
    struct td__part_streams *streams = streams_of(part, device, lane);
    if (!streams) {
        pthread_mutex_lock(&part->group->parts_lock);
        streams = streams_of(part, device, lane);
        if (!streams)
            streams = add_streams(part, device, lane);
        pthread_mutex_unlock(&part->group->parts_lock);
    }
    return streams ? streams->streams[which] : NULL;
}

td_stream *td__part_stream(struct td__part *part, td_device *device, enum td__part_stream which)
{
    return stream_in_lane(part, device, which, 0);
}

/* A backend with submit() enqueues messages, which wait for the other rank on the device: those from one rank, and those
 * to it, must not wait for others, as they do not on host memory. So each has a stream of its own. */
static int lane_of(const td_call *call)
{
    return 1 + 2 * (call->peer + 1) + (call->kind == TD_OP_RECV);
}

struct td__part *td__part_prepare(td_group *group, td_call *call)
{
    struct td__part *part = td__part_of_device(group, call->device);
    if (!part) {
        struct td__backend_found found;
        int other = -1;
        pthread_mutex_lock(&group->parts_lock);
        part = td__part_of_device(group, call->device);
        if (!part && !find_for_kind(group, call, call->device->kind_name, &found, &other) &&
            !add_kind(group, call->device->kind_name, &found))
            part = td__part_of_device(group, call->device);
        pthread_mutex_unlock(&group->parts_lock);
        if (other >= 0) {
            td__group_break(group, TD_ERR_MISMATCH); /* with the last error, which says more */
            td__abort_own(group, td__abort_backends(other), true);
        }
    }
    if (!part)
        return NULL;
    call->stream = call->kind < TD_OP_SEND
                       ? td__part_stream(part, call->device, TD__STREAM_COLLECTIVES)
                       : stream_in_lane(part, call->device, TD__STREAM_MESSAGES,
                                        part->submits ? lane_of(call) : 0);
    return call->stream ? part : NULL;
}
