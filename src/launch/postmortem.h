/* The postmortem of a job, out of the pages of its flight recorder: where each rank was, which one failed first, and why.
 *
 * It is taken at one moment, of a copy of the pages: when a worker has failed, before the others are
 * signalled to end, since afterwards all of them have failed. */
#ifndef TD_LAUNCH_POSTMORTEM_H
#define TD_LAUNCH_POSTMORTEM_H

#include "base/buffer.h"
#include "os/flight_read.h"

/** What a rank is for the postmortem, the worst first. */
enum td__postmortem_state {
    TD__STORY_CAUSE,    /* it failed first */
    TD__STORY_FAILED,   /* by itself */
    TD__STORY_SUFFERED, /* because of another one */
    TD__STORY_NEVER,    /* has not begun to join the others */
    TD__STORY_JOINING,
    TD__STORY_IDLE,    /* in no call */
    TD__STORY_CALLING, /* in a call */
    TD__STORY_LEAVING,
    TD__STORY_LEFT,
    TD__STORY_ENDED, /* with exit code 0 */
};

struct td__postmortem_rank {
    enum td__postmortem_state state;
    int slot; /* in its book */
    struct td__flight_page
        *page; /* its rank and pid are those that the launcher gave, where there is one */
    bool ended;
    bool outlived; /* it has gone on with a group that is newer than the last failure */
    const struct td__flight_call *current; /* in the page: the one that it is in, or NULL */
    const struct td__flight_call *last;    /* the one that it ended last, or NULL */
    int under_way;                         /* that were started, and that no thread waits for */
    double rate;                           /* operations a second, of the last ones */
};

/** One book: the workers of one launcher, or one file. */
struct td__postmortem_book {
    void *bytes;
    size_t size;
    struct td__flight_book_info info;
};

/** A copy of a book that others write to; NULL where it is none, or there is no memory for it. */
struct td__postmortem_book *td__postmortem_book_copy(const struct td__flight_book *book);

void td__postmortem_books_free(struct td__postmortem_book *books, int count);

struct td__postmortem {
    int64_t moment_ns; /* wall clock: "ago" counts from here */
    struct td__postmortem_book *books;
    int book_count;
    struct td__postmortem_rank *ranks; /* in order */
    int count;
    const struct td__postmortem_rank *cause; /* the one that failed first, or NULL */
    struct td__flight_page **spares; /* processes without a rank, in order */
    int spare_count;
};

/** Takes the postmortem of `books`, which are the postmortem's from now on, also on failure. `now` is NULL for
 *  the present. `live`: the processes are there, and "ago" counts from now; otherwise from the latest moment
 *  that the books know of. `first_slot` is that of the worker that the launcher saw fail first, or -1. */
td_status td__postmortem_take(struct td__postmortem_book *books, int count,
                              const struct td__flight_now *now, bool live, int first_slot,
                              struct td__postmortem *postmortem);
void td__postmortem_free(struct td__postmortem *postmortem);

/** The same of a launcher's own book. */
td_status td__postmortem_of_book(const struct td__flight_book *book, int first_slot,
                                 struct td__postmortem *postmortem);

/** True where a rank has joined, or tried to: otherwise there is nothing to report. */
bool td__postmortem_has_any(const struct td__postmortem *postmortem);

/** What one rank did: "in all_reduce #17 of 4 f32 on "world" (bucket 3) for 1.2 s", without its number.
 *  The time, where there is one, stands between `before` and `after`. */
struct td__postmortem_line {
    char before[1024];
    bool timed;
    double seconds;
    char after[512];
};

void td__postmortem_line(const struct td__postmortem *postmortem, int index,
                         struct td__postmortem_line *line);

/** The whole of a line. */
void td__postmortem_line_text(const struct td__postmortem_line *line, char *text, size_t room);

/** The rank of a slot, in a postmortem of one book; NULL for -1. */
struct td__postmortem_rank *td__postmortem_rank_of(const struct td__postmortem *postmortem,
                                                   int slot);

/** Where a rank that has ended was then: " during all_reduce #17 of 4 f32 on "world", 0.8 s into it". */
void td__postmortem_where(const struct td__postmortem_rank *rank, char *text, size_t room);

/** "all_reduce #17 of 4 f32 on "world" (bucket 3)", of a call in `page`. */
void td__postmortem_call(const struct td__flight_page *page, const struct td__flight_call *call,
                         char text[256]);

/** All of it as lines that fit 100 columns, each after `margin`. */
void td__postmortem_print(const struct td__postmortem *postmortem, const char *margin,
                          struct td__buffer *text);

/** All of it as one JSON object, with all operations where `whole`. */
void td__postmortem_print_json(const struct td__postmortem *postmortem, bool whole,
                               struct td__buffer *text);

/** Marks the ranks in the collective that most ranks wait in, and those of its group that have not reached it;
 *  or the ranks in td_init_process_group(), and those that have not called it. Returns the index of one that
 *  waits, -1 where no rank is missing, or none is known. Both lists have an entry for each rank. */
int td__postmortem_find_gap(const struct td__postmortem *postmortem, bool *waiting, bool *missing);

/** "1.2 s", "350 ms", "4 min 10 s". */
void td__postmortem_duration(double seconds, char text[32]);

/** The name of a state in a word or two, "in a call". */
const char *td__postmortem_state_name(enum td__postmortem_state state);

/** Appends text, cut at 1023 bytes. */
void td__postmortem_put(struct td__buffer *out, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
