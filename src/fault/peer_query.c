/* Queries between ranks, the survey of a call that takes long, and the warning about it; see peer_query.h.
 *
 * A rank's endpoint answers queries from its recorder, whatever its program does. So no rank keeps state about
 * others, and calls that are not late cost nothing. */
#include "fault/peer_query.h"

#include "base/fail.h"
#include "base/number.h"
#include "base/text.h"
#include "fault/call_history.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    QUERY_MS = 250,   /* for one answer, and more where few are queried */
    SURVEY_MS = 1000, /* for all */
    QUERIED = 32,     /* ranks at most */
    STALL_S = 30,
};

/* ---- Answering ------------------------------------------------------------------------------- */

static void put_text(struct td__buffer *answer, const char *text)
{
    td__buffer_put_string(answer, text, strlen(text));
}

static void answer_progress(struct td__root *root, int rank, uint64_t key, uint64_t value,
                            struct td__buffer *answer)
{
    (void)rank;
    (void)value;
    struct td__flight_last last;
    td__recorder_last(root, key, &last);
    td__buffer_put_u64(answer, last.started);
    td__buffer_put_u64(answer, last.done);
    td__buffer_put_u8(answer, last.running);
    td__buffer_put_u64(answer, (uint64_t)last.age_ms);
    put_text(answer, last.text);
    put_text(answer, last.now);
}

static void answer(void *arg, int rank, uint32_t topic, uint64_t group, uint64_t value,
                   struct td__buffer *text)
{
    static td__topic_fn *const answers[TD__TOPICS] = {
        [TD__TOPIC_PROGRESS] = answer_progress,      [TD__TOPIC_ABORT] = td__abort_receive,
        [TD__TOPIC_SHRINK] = td__shrink_answer,      [TD__TOPIC_BARRIER] = td__barrier_answer,
        [TD__TOPIC_CALLS] = td__call_history_answer, [TD__TOPIC_ADMIT] = td__admit_answer,
    };
    if (topic < TD__TOPICS && answers[topic])
        answers[topic](arg, rank, group, value, text);
}

/* ---- Querying -------------------------------------------------------------------------------- */

void td__read_text(struct td__reader *reader, char *text, size_t room)
{
    struct td__span span = td__reader_string(reader, room - 1);
    if (span.size)
        memcpy(text, span.data, span.size);
    text[span.size] = 0;
    for (size_t i = 0; i < span.size; i++)
        if ((unsigned char)text[i] < ' ' || text[i] == 127)
            text[i] = '?';
}

static bool query_progress(struct td__root *root, int rank, uint64_t key, td__deadline deadline,
                           struct td__flight_last *last)
{
    struct td__buffer bytes = {0};
    bool known = false;
    *last = (struct td__flight_last){0};
    if (!td__endpoint_query(root->endpoint, rank, TD__TOPIC_PROGRESS, key, 0, deadline, &bytes)) {
        struct td__reader reader = td__reader_of(bytes.data, bytes.size);
        last->started = td__reader_u64(&reader);
        last->done = td__reader_u64(&reader);
        last->running = td__reader_u8(&reader);
        last->age_ms = (int64_t)td__reader_u64(&reader);
        td__read_text(&reader, last->text, sizeof last->text);
        td__read_text(&reader, last->now, sizeof last->now);
        known = td__reader_done(&reader);
    }
    td__buffer_free(&bytes);
    return known;
}

/* ---- The survey ------------------------------------------------------------------------------ */

/* The members of a group, copied since it may be destroyed during the survey, and the result. */
struct survey {
    struct td__root *root;
    uint64_t key, sequence;
    int size, rank;
    int *ranks;
    int first; /* the first rank that has joined; -1: none has */
    char joined[160];
    int joined_count;
    char late[TD__PROGRESS_TEXT - 200];
    int not_queried;
};

static struct survey survey_of(const td_group *group, uint64_t sequence)
{
    return (struct survey){.root = group->root,
                           .key = group->key,
                           .sequence = sequence,
                           .size = group->size,
                           .rank = group->rank,
                           .ranks = group->ranks,
                           .first = -1};
}

static void note_joined(struct survey *survey, int index)
{
    if (survey->first < 0)
        survey->first = index;
    td__text_add(survey->joined, sizeof survey->joined, "%s%d", survey->joined_count++ ? ", " : "",
                 survey->ranks[index]);
}

static void note_late(struct survey *survey, int index, const char *what)
{
    char part[400];
    int length = snprintf(part, sizeof part, "; rank %d %s", survey->ranks[index], what);
    if (strlen(survey->late) + (size_t)length < sizeof survey->late)
        td__text_add(survey->late, sizeof survey->late, "%s", part);
    else
        survey->not_queried++;
}

static void describe_last(const struct td__flight_last *last, char *text, size_t room)
{
    double seconds = (double)last->age_ms / 1000;
    if (last->text[0] && last->running)
        snprintf(text, room, "is in %s (for %.1f s)", last->text, seconds);
    else if (last->text[0])
        snprintf(text, room, "finished %s %.1f s ago, and is in %s", last->text, seconds,
                 last->now[0] ? last->now : "no call");
    else
        snprintf(text, room, "has called nothing on this group, and is in %s",
                 last->now[0] ? last->now : "no call");
}

/* An answer from a busy machine takes its time: a rank may use up what is not kept for the `further` ones. */
static td__deadline query_limit(int further, td__deadline end)
{
    td__deadline own = td__deadline_in_ms(QUERY_MS);
    td__deadline unkept = end - (int64_t)further * QUERY_MS * 1000000;
    return td__deadline_earlier(end, own > unkept ? own : unkept);
}

static void query_one(struct survey *survey, int index, int further, td__deadline end)
{
    struct td__endpoint *endpoint = survey->root->endpoint;
    int rank = survey->ranks[index];
    const char *exit_reason = td__endpoint_exit_reason(endpoint, rank);
    struct td__flight_last last;
    char text[360];
    if (exit_reason) {
        note_late(survey, index, exit_reason);
    } else if (td__endpoint_is_stopped(endpoint, rank)) {
        note_late(survey, index, "is stopped, by SIGSTOP or a debugger");
    } else if (td__deadline_passed(end)) {
        survey->not_queried++;
    } else if (!query_progress(survey->root, rank, survey->key, query_limit(further, end), &last)) {
        exit_reason = td__endpoint_exit_reason(endpoint, rank);
        note_late(survey, index, exit_reason ? exit_reason : "does not answer");
    } else if (survey->sequence && last.started >= survey->sequence) {
        note_joined(survey, index);
    } else {
        describe_last(&last, text, sizeof text);
        note_late(survey, index, text);
    }
}

static void take_survey(struct survey *survey, int peer)
{
    td__deadline end = td__deadline_in_ms(SURVEY_MS);
    int queried = 0, all = peer >= 0 ? 1 : survey->size - 1;
    for (int i = 0; i < survey->size; i++) {
        if (i == survey->rank && survey->sequence)
            note_joined(survey, i);
        if (i == survey->rank || (peer >= 0 && i != peer))
            continue;
        if (queried++ < QUERIED)
            query_one(survey, i, all - queried, end);
        else
            survey->not_queried++;
    }
}

static void survey_text(const struct survey *survey, char text[TD__PROGRESS_TEXT])
{
    bool several = survey->joined_count > 1;
    const char *late = survey->late;
    text[0] = 0;
    if (survey->joined_count)
        td__text_add(text, TD__PROGRESS_TEXT, "rank%s %s %s joined", several ? "s" : "",
                     survey->joined, several ? "have" : "has");
    else if (*late)
        late += 2;
    td__text_add(text, TD__PROGRESS_TEXT, "%s", late);
    if (survey->not_queried)
        td__text_add(text, TD__PROGRESS_TEXT, "; %d more rank%s not queried", survey->not_queried,
                     survey->not_queried > 1 ? "s were" : " was");
}

void td__describe_progress(td_group *group, uint64_t sequence, int peer,
                           char text[TD__PROGRESS_TEXT])
{
    struct survey survey = survey_of(group, sequence);
    take_survey(&survey, peer);
    survey_text(&survey, text);
}

td_status td__explain_delay(td_group *group, uint64_t sequence, int peer, td_status status)
{
    char progress[TD__PROGRESS_TEXT];
    struct td__error error;
    if (status != TD_ERR_TIMEOUT || group->size == 1)
        return status;
    td__error_save(&error);
    td__describe_progress(group, sequence, peer, progress);
    return td_fail(status, progress[0] ? "%s; %s" : "%s%s", error.text, progress);
}

/* ---- Warnings about calls that take long ----------------------------------------------------- */

td_status td__stall_limit(int64_t *limit_ms)
{
    const char *text = getenv("TANDEM_STALL_WARN");
    int seconds = STALL_S;
    if (text && *text && !td__parse_int(text, 0, 86400, &seconds))
        return td_fail(TD_ERR_INVALID,
                       "TANDEM_STALL_WARN is \"%s\"; it is a number of seconds, 0 for no warning",
                       text);
    *limit_ms = (int64_t)seconds * 1000;
    return TD_OK;
}

/* Copies the group with this key; false if it does not exist any more. */
static bool copy_group(struct td__root *root, uint64_t key, uint64_t sequence,
                       struct survey *survey, char name[128])
{
    int *ranks = NULL;
    pthread_mutex_lock(&root->lock);
    const td_group *group = td__root_find(root, key);
    size_t size = group && group->rank >= 0 ? sizeof *ranks * (size_t)group->size : 0;
    if (size && (ranks = malloc(size))) {
        *survey = survey_of(group, sequence);
        survey->ranks = memcpy(ranks, group->ranks, size);
        snprintf(name, 128, "%s", group->name);
    }
    pthread_mutex_unlock(&root->lock);
    return ranks != NULL;
}

/* Of the ranks that wait in the same call, only the first one warns. */
static void warn(struct td__root *root, uint64_t key, uint64_t sequence, int64_t age_ms,
                 const char *what)
{
    struct survey survey;
    char name[128], text[TD__PROGRESS_TEXT];
    if (!copy_group(root, key, sequence, &survey, name))
        return;
    take_survey(&survey, -1);
    survey_text(&survey, text);
    if (!sequence || survey.first == survey.rank)
        td_log(TD_LOG_WARN, "%s on group \"%s\" is not done after %lld s; %s", what, name,
               (long long)(age_ms / 1000), text);
    free(survey.ranks);
}

static void on_tick(void *arg)
{
    struct td__root *root = arg;
    struct td__stall *stall = &root->stall;
    uint64_t key, sequence;
    int64_t age_ms;
    char text[160];
    td__break_lost_groups(root);
    if (!stall->limit_ms || !td__recorder_oldest_running(root, &key, &sequence, &age_ms, text)) {
        stall->next_ms = stall->limit_ms;
        return;
    }
    if (key != stall->key || sequence != stall->sequence || age_ms < stall->age_ms)
        stall->next_ms = stall->limit_ms;
    stall->key = key;
    stall->sequence = sequence;
    stall->age_ms = age_ms;
    if (age_ms < stall->next_ms)
        return;
    stall->next_ms = age_ms * 2;
    warn(root, key, sequence, age_ms, text);
}

/* ---- Life ------------------------------------------------------------------------------------ */

static void on_exclusion(void *arg)
{
    td__abort_excluded(arg);
}

/* The first group has all ranks of the root, in order. */
static bool has_left(void *arg, int rank)
{
    const struct td__part *host = &((struct td__root *)arg)->first->host;
    return host->ops->has_left(host->self, rank) > 0;
}

static bool knows_departures(const td_group *group)
{
    const struct td__part *host = &group->host;
    bool knows = false;
    for (int i = 0; host->ops->has_left && i < group->size && !knows; i++)
        knows = i != group->rank && host->ops->has_left(host->self, i) >= 0;
    return knows;
}

td_status td__peer_query_begin(struct td__root *root)
{
    TD_TRY(td__stall_limit(&root->stall.limit_ms));
    td__endpoint_answer(root->endpoint, answer, root);
    if (root->size == 1)
        return TD_OK;
    td__detector_fns fns = {.has_left = knows_departures(root->first) ? has_left : NULL,
                            .tick = on_tick,
                            .excluded = on_exclusion};
    return td__endpoint_start_detector(root->endpoint, &fns, root);
}

void td__peer_query_end(struct td__root *root)
{
    td__endpoint_stop_detector(root->endpoint);
    td__endpoint_answer(root->endpoint, NULL, NULL);
}
