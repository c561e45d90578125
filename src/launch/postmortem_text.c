/* The postmortem of a job in lines for people; see postmortem.h. */
#include "launch/postmortem.h"

#include "base/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 100, MANY = 16 };

void td__postmortem_duration(double seconds, char text[32])
{
    if (seconds < 0)
        seconds = 0;
    if (seconds < 1e-3)
        snprintf(text, 32, "%.0f µs", seconds * 1e6);
    else if (seconds < 0.0995)
        snprintf(text, 32, "%.1f ms", seconds * 1e3);
    else if (seconds < 120)
        snprintf(text, 32, "%.1f s", seconds);
    else if (seconds < 7200)
        snprintf(text, 32, "%d min %d s", (int)seconds / 60, (int)seconds % 60);
    else
        snprintf(text, 32, "%.0f h %d min", seconds / 3600 - 0.5, (int)(seconds / 60) % 60);
}

const char *td__postmortem_state_name(enum td__postmortem_state state)
{
    static const char *const names[] = {
        [TD__STORY_CAUSE] = "failed first",
        [TD__STORY_FAILED] = "failed",
        [TD__STORY_SUFFERED] = "failed after",
        [TD__STORY_NEVER] = "not joined",
        [TD__STORY_JOINING] = "joining",
        [TD__STORY_IDLE] = "in no call",
        [TD__STORY_CALLING] = "in a call",
        [TD__STORY_LEAVING] = "leaving",
        [TD__STORY_LEFT] = "left",
        [TD__STORY_ENDED] = "ended",
    };
    return names[state];
}

/* ---- One rank -------------------------------------------------------------------------------- */

#define ADD(text, ...) td__text_add(text, sizeof text, __VA_ARGS__)

void td__postmortem_call(const struct td__flight_page *page, const struct td__flight_call *call,
                         char text[256])
{
    char what[TD__FLIGHT_TEXT];
    td__flight_describe(call, what);
    snprintf(text, 256, "%s on \"%s\"", what, page->groups[call->group]);
    if (call->label[0])
        td__text_add(text, 256, " (%s)", call->label);
}

static void time_it(struct td__postmortem_line *line, int64_t from_ns, int64_t to_ns)
{
    line->timed = true;
    line->seconds = from_ns && to_ns > from_ns ? (double)(to_ns - from_ns) / 1e9 : 0;
}

/* "1.2 s before" */
static void time_since(struct td__postmortem_line *line, int64_t from_ns, int64_t to_ns)
{
    ADD(line->after, " before");
    time_it(line, from_ns, to_ns);
}

/* ", 0.8 s into it", where the end is known. */
static void time_end(struct td__postmortem_line *line, int64_t from_ns, int64_t end_ns,
                     const char *after)
{
    if (end_ns) {
        ADD(line->before, ", ");
        time_it(line, from_ns, end_ns);
    }
    ADD(line->after, "%s", after);
}

/* Where a rank was when it ended. */
static void tell_place(const struct td__postmortem_rank *rank, struct td__postmortem_line *line)
{
    char text[512];
    const struct td__flight_page *page = rank->page;
    int64_t end_ns = page->ended_ns;
    if (rank->current && rank->current->started_ns >= page->failure_ns) {
        td__postmortem_call(page, rank->current, text);
        ADD(line->before, " during %s", text);
        time_end(line, rank->current->started_ns, end_ns, end_ns ? " into it" : "");
    } else if (page->failure && !rank->outlived) {
        snprintf(text, sizeof text, " after it got: %.400s", page->sentence);
        time_end(line, page->failure_ns, end_ns, text);
    } else if (page->phase == TD__FLIGHT_ABSENT) {
        ADD(line->before, " before it joined the others");
    } else if (page->phase == TD__FLIGHT_JOINING) {
        ADD(line->before, " while it joined the others");
    } else if (page->phase >= TD__FLIGHT_LEAVING) {
        ADD(line->before, " %s",
            page->phase == TD__FLIGHT_LEFT ? "after it had left in order" : "while it left");
    } else if (rank->last) {
        strcpy(text, " after ");
        td__postmortem_call(page, rank->last, text + strlen(text));
        ADD(line->before, " in no call");
        time_end(line, rank->last->ended_ns, end_ns, text);
    } else {
        ADD(line->before, " before its first call");
    }
}

static void tell_failure(const struct td__postmortem *postmortem,
                         const struct td__postmortem_rank *rank, struct td__postmortem_line *line)
{
    ADD(line->before, "%s",
        rank->state == TD__STORY_CAUSE    ? "failed first"
        : rank->state == TD__STORY_FAILED ? "failed"
                                          : "failed because of another rank");
    if (rank->ended) {
        ADD(line->before, ": %s", rank->page->ending);
        tell_place(rank, line);
        return;
    }
    ADD(line->before, ", ");
    time_since(line, rank->page->failure_ns, postmortem->moment_ns);
    ADD(line->after, " the end: %.400s", rank->page->sentence);
}

static void tell_calls(const struct td__postmortem *postmortem,
                       const struct td__postmortem_rank *rank, struct td__postmortem_line *line)
{
    char call[256];
    if (rank->state == TD__STORY_CALLING) {
        bool queued = rank->current->state == TD__FLIGHT_QUEUED;
        td__postmortem_call(rank->page, rank->current, call);
        ADD(line->before, "%s %s for ", queued ? "waited for its turn with" : "was in", call);
        time_it(line, queued ? rank->current->queued_ns : rank->current->started_ns,
                postmortem->moment_ns);
        return;
    }
    if (!rank->last) {
        ADD(line->before, "was in no call, and had made none since it joined ");
        time_since(line, rank->page->phase_ns, postmortem->moment_ns);
        return;
    }
    td__postmortem_call(rank->page, rank->last, call);
    ADD(line->before, "was in no call; %s had %s ", call,
        rank->last->state == TD__FLIGHT_FAILED ? "failed" : "ended");
    time_since(line, rank->last->ended_ns, postmortem->moment_ns);
    if (rank->under_way)
        ADD(line->after, ", and %d more %s under way", rank->under_way,
            rank->under_way == 1 ? "was" : "were");
    if (rank->last->state == TD__FLIGHT_FAILED && rank->page->failure)
        ADD(line->after, ": %.400s", rank->page->sentence);
}

void td__postmortem_line(const struct td__postmortem *postmortem, int index,
                         struct td__postmortem_line *line)
{
    const struct td__postmortem_rank *rank = &postmortem->ranks[index];
    *line = (struct td__postmortem_line){.timed = false};
    switch (rank->state) {
    case TD__STORY_CAUSE:
    case TD__STORY_FAILED:
    case TD__STORY_SUFFERED:
        tell_failure(postmortem, rank, line);
        break;
    case TD__STORY_NEVER:
        ADD(line->before, "never joined");
        break;
    case TD__STORY_JOINING:
    case TD__STORY_LEAVING:
        ADD(line->before, "%s the others for ",
            rank->state == TD__STORY_JOINING ? "waited to join" : "was leaving");
        time_it(line, rank->page->phase_ns, postmortem->moment_ns);
        break;
    case TD__STORY_IDLE:
    case TD__STORY_CALLING:
        tell_calls(postmortem, rank, line);
        break;
    case TD__STORY_LEFT:
        ADD(line->before, "had left in order ");
        time_since(line, rank->page->phase_ns, postmortem->moment_ns);
        break;
    case TD__STORY_ENDED:
        ADD(line->before, "had ended with exit code 0 ");
        time_since(line, rank->page->ended_ns, postmortem->moment_ns);
        break;
    }
}

void td__postmortem_line_text(const struct td__postmortem_line *line, char *text, size_t room)
{
    char time[32] = "";
    if (line->timed)
        td__postmortem_duration(line->seconds, time);
    snprintf(text, room, "%s%s%s", line->before, time, line->after);
}

void td__postmortem_where(const struct td__postmortem_rank *rank, char *text, size_t room)
{
    struct td__postmortem_line line = {.timed = false};
    tell_place(rank, &line);
    td__postmortem_line_text(&line, text, room);
}

/* ---- Lines ----------------------------------------------------------------------------------- */

static void put(struct td__buffer *out, const char *text)
{
    td__buffer_put(out, text, strlen(text));
}

/* The columns that `size` bytes of UTF-8 take, about: its characters. */
static size_t columns(const char *text, size_t size)
{
    size_t count = 0;
    for (size_t i = 0; i < size; i++)
        count += ((unsigned char)text[i] & 0xc0) != 0x80;
    return count;
}

/* One sentence in lines of at most WIDTH columns, all but the first a little further to the right. */
static void wrap(struct td__buffer *out, const char *margin, const char *text)
{
    size_t column = strlen(margin);
    put(out, margin);
    while (*text) {
        size_t word = strcspn(text, " "), step = word + strspn(text + word, " ");
        size_t wide = columns(text, word);
        if (column + wide > WIDTH && column > strlen(margin) + 4) {
            put(out, "\n");
            put(out, margin);
            put(out, "    ");
            column = strlen(margin) + 4;
        }
        td__buffer_put(out, text, word);
        column += wide;
        if (step > word && text[step]) {
            bool fits = column + 1 + columns(text + step, strcspn(text + step, " ")) <= WIDTH;
            put(out, fits ? " " : "");
            column += fits ? 1 : WIDTH;
        }
        text += step;
    }
    put(out, "\n");
}

/* "3-41, 43" of those that are marked. */
static void list_ranks(const struct td__postmortem *postmortem, const bool *marked, char *text,
                       size_t room)
{
    text[0] = 0;
    for (int i = 0; i < postmortem->count; i++) {
        if (!marked[i])
            continue;
        int end = i;
        while (end + 1 < postmortem->count && marked[end + 1] &&
               postmortem->ranks[end + 1].page->rank == postmortem->ranks[end].page->rank + 1)
            end++;
        if (strlen(text) + 48 > room) {
            td__text_add(text, room, ", …");
            return;
        }
        td__text_add(text, room, "%s%d", text[0] ? ", " : "", postmortem->ranks[i].page->rank);
        if (end > i)
            td__text_add(text, room, "%s%d", end > i + 1 ? "-" : ", ",
                         postmortem->ranks[end].page->rank);
        i = end;
    }
}

static int count_marked(const struct td__postmortem *postmortem, const bool *marked)
{
    int count = 0;
    for (int i = 0; i < postmortem->count; i++)
        count += marked[i];
    return count;
}

static bool same_but_for_the_time(const struct td__postmortem_line *a,
                                  const struct td__postmortem_line *b)
{
    return a->timed == b->timed && !strcmp(a->before, b->before) && !strcmp(a->after, b->after);
}

/* What is printed at present. */
struct report {
    const struct td__postmortem *postmortem;
    const char *margin;
    struct td__buffer *out;
    struct td__postmortem_line *lines; /* of each rank */
    bool *printed;                     /* in this line or an earlier one … */
    bool *marked;                      /* … and in this one */
};

/* One line for `first`, and when there are many ranks for all those that did the same. */
static void print_alike(struct report *report, int first)
{
    const struct td__postmortem *postmortem = report->postmortem;
    const struct td__flight_page *page = postmortem->ranks[first].page;
    const struct td__postmortem_line *line = &report->lines[first];
    char text[2048] = "", list[512], from[32], to[32];
    double shortest = line->seconds, longest = line->seconds;
    memset(report->marked, 0, (size_t)postmortem->count * sizeof *report->marked);
    report->marked[first] = report->printed[first] = true;
    for (int i = first + 1; postmortem->count > MANY && i < postmortem->count; i++) {
        double seconds = report->lines[i].seconds;
        if (report->printed[i] || postmortem->ranks[i].state != postmortem->ranks[first].state ||
            !same_but_for_the_time(line, &report->lines[i]))
            continue;
        report->marked[i] = report->printed[i] = true;
        shortest = seconds < shortest ? seconds : shortest;
        longest = seconds > longest ? seconds : longest;
    }
    bool several = count_marked(postmortem, report->marked) > 1, hosts = postmortem->book_count > 1;
    list_ranks(postmortem, report->marked, list, sizeof list);
    ADD(text, "%s %s", several ? "ranks" : "rank", list);
    if (!several && page->pid)
        ADD(text, " (pid %d%s%s)", page->pid, hosts ? " on " : "", hosts ? page->host : "");
    ADD(text, "%s %s", several ? ": each" : "", line->before);
    td__postmortem_duration(shortest, from);
    td__postmortem_duration(longest, to);
    if (line->timed && strcmp(from, to) != 0)
        ADD(text, "%s to %s", from, to);
    else if (line->timed)
        ADD(text, "%s", from);
    ADD(text, "%s", line->after);
    wrap(report->out, report->margin, text);
}

static void print_gap(struct report *report)
{
    const struct td__postmortem *postmortem = report->postmortem;
    char text[2048] = "", behind[512], ahead[512], call[256] = "td_init_process_group()";
    bool *waiting = report->printed, *missing = report->marked;
    int found = td__postmortem_find_gap(postmortem, waiting, missing);
    if (found < 0)
        return;
    const struct td__postmortem_rank *there = &postmortem->ranks[found];
    list_ranks(postmortem, waiting, ahead, sizeof ahead);
    list_ranks(postmortem, missing, behind, sizeof behind);
    if (there->state == TD__STORY_CALLING)
        td__postmortem_call(there->page, there->current, call);
    ADD(text, "rank%s %s had not come to %s, where rank%s %s waited",
        count_marked(postmortem, missing) > 1 ? "s" : "", behind, call,
        count_marked(postmortem, waiting) > 1 ? "s" : "", ahead);
    wrap(report->out, report->margin, text);
}

void td__postmortem_print(const struct td__postmortem *postmortem, const char *margin,
                          struct td__buffer *out)
{
    size_t count = (size_t)postmortem->count + 1;
    struct report report = {
        .postmortem = postmortem,
        .margin = margin,
        .out = out,
        .lines = malloc(count * sizeof *report.lines),
        .printed = calloc(count, sizeof *report.printed),
        .marked = calloc(count, sizeof *report.marked),
    };
    if (report.lines && report.printed && report.marked) {
        for (int i = 0; i < postmortem->count; i++)
            td__postmortem_line(postmortem, i, &report.lines[i]);
        for (int state = TD__STORY_CAUSE; state <= TD__STORY_ENDED; state++)
            for (int i = 0; i < postmortem->count; i++)
                if (!report.printed[i] && (int)postmortem->ranks[i].state == state)
                    print_alike(&report, i);
        print_gap(&report);
    }
    free(report.lines);
    free(report.printed);
    free(report.marked);
}
