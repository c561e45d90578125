/* The line of a progress bar:
 *
 *     epoch 1   44% ████████▌           422/938  151.2 batch/s  0:03 left  loss 0.4321
 *
 * Each part is formatted by itself. If they exceed the width, parts are dropped in this order: the
 * bar, the rate, the count, the time, the percentage; then the label is truncated. The bar takes up
 * to 40 of the columns that are left. Widths are columns of a terminal, not bytes. */
#include "data/progress.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { LEAST_BAR = 5, MOST_BAR = 40, PART = 96 };

/* In the order in which they stand. */
enum part { LABEL, PERCENT, BAR, COUNT, RATE, TIME, LOSS, PARTS };

struct parts {
    char text[PARTS][4 * PART];
    int columns[PARTS]; /* 0: dropped */
};

/* ---- UTF-8 ----------------------------------------------------------------------------------- */

/* Decodes one character; -1 and one byte for invalid UTF-8. */
static int read_character(const char *text, int *bytes)
{
    const unsigned char *at = (const unsigned char *)text;
    int length = at[0] < 0x80                    ? 1
                 : at[0] >= 0xc2 && at[0] < 0xe0 ? 2
                 : (at[0] & 0xf0) == 0xe0        ? 3
                 : at[0] >= 0xf0 && at[0] < 0xf5 ? 4
                                                 : 0;
    int value = length == 1 ? at[0] : length ? at[0] & (0x7f >> length) : -1;
    for (int i = 1; i < length; i++) {
        if ((at[i] & 0xc0) != 0x80) {
            *bytes = 1;
            return -1;
        }
        value = value << 6 | (at[i] & 0x3f);
    }
    *bytes = length ? length : 1;
    return value;
}

/* The columns of a character: East Asian ones and most pictures take two, accents none. */
static int columns_of(int value)
{
    static const struct {
        int from, to, columns;
    } ranges[] = {
        {0x300, 0x36f, 0},   {0x200b, 0x200f, 0},   {0xfe00, 0xfe0f, 0},   {0x1100, 0x115f, 2},
        {0x2e80, 0xa4cf, 2}, {0xac00, 0xd7a3, 2},   {0xf900, 0xfaff, 2},   {0xfe30, 0xfe6f, 2},
        {0xff00, 0xff60, 2}, {0x1f300, 0x1faff, 2}, {0x20000, 0x3fffd, 2},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (value >= ranges[i].from && value <= ranges[i].to)
            return ranges[i].columns;
    return 1;
}

/* Copies text of at most `width` columns. Control characters and invalid UTF-8 become question
 * marks, so that a label cannot control the terminal. Returns the columns. */
static int copy_text(char *to, size_t capacity, const char *from, int width)
{
    int columns = 0;
    size_t used = 0;
    while (*from) {
        int bytes, value = read_character(from, &bytes);
        bool plain = value >= 0x20 && value != 0x7f && !(value >= 0x80 && value < 0xa0);
        int more = plain ? columns_of(value) : 1;
        size_t size = plain ? (size_t)bytes : 1;
        if (columns + more > width || used + size + 1 > capacity)
            break;
        memcpy(to + used, plain ? from : "?", size);
        used += size;
        columns += more;
        from += bytes;
    }
    to[used] = '\0';
    return columns;
}

/* ---- The parts ------------------------------------------------------------------------------- */

/* Three or four digits, with a k or M behind them where that needs it. */
static void put_number(char *text, size_t capacity, double number)
{
    const char *suffix = number >= 999.5e6   ? "G"
                         : number >= 999.5e3 ? "M"
                         : number >= 9999.5  ? "k"
                                             : "";
    double value = number / (*suffix == 'G'   ? 1e9
                             : *suffix == 'M' ? 1e6
                             : *suffix == 'k' ? 1e3
                                              : 1);
    int decimals = value >= 999.5 ? 0 : value >= 9.995 ? 1 : 2;
    if (*suffix && value >= 99.95)
        decimals = 0;
    snprintf(text, capacity, "%.*f%s", decimals, value, suffix);
}

/* 0:07, 12:34, 1:02:03; "?" for very long times. */
static void put_time(char *text, size_t capacity, double seconds)
{
    if (!(seconds < 1e6 * 3600)) {
        snprintf(text, capacity, "?");
        return;
    }
    int64_t whole = (int64_t)(seconds + 0.5), hours = whole / 3600;
    int minutes = (int)(whole / 60 % 60), rest = (int)(whole % 60);
    if (hours)
        snprintf(text, capacity, "%" PRId64 ":%02d:%02d", hours, minutes, rest);
    else
        snprintf(text, capacity, "%d:%02d", minutes, rest);
}

static void put_rate(struct parts *parts, const struct td__progress_view *view, const char *unit)
{
    char number[32];
    if (view->done <= 0 || !(view->elapsed_s > 0))
        return;
    double rate = (double)view->done / view->elapsed_s;
    put_number(number, sizeof number, rate >= 1 ? rate : 1 / rate);
    if (rate >= 1)
        snprintf(parts->text[RATE], sizeof parts->text[RATE], "%s %s/s", number, unit);
    else
        snprintf(parts->text[RATE], sizeof parts->text[RATE], "%s s/%s", number, unit);
}

static void put_clock(struct parts *parts, const struct td__progress_view *view)
{
    char time[32];
    bool left = view->total > 0 && !view->finished;
    if (left && view->done <= 0)
        return;
    double rest = view->total > view->done ? (double)(view->total - view->done) : 0;
    put_time(time, sizeof time,
             left ? view->elapsed_s / (double)view->done * rest : view->elapsed_s);
    snprintf(parts->text[TIME], sizeof parts->text[TIME], left ? "%s left" : "%s", time);
}

static double share_done(const struct td__progress_view *view)
{
    double share = (double)view->done / (double)view->total;
    return share < 0 ? 0 : share > 1 ? 1 : share;
}

static void put_parts(struct parts *parts, const struct td__progress_view *view, int width)
{
    memset(parts, 0, sizeof *parts);
    char unit[PART];
    copy_text(unit, sizeof unit, view->unit ? view->unit : "batch", 20);
    if (view->label)
        copy_text(parts->text[LABEL], sizeof parts->text[LABEL], view->label, width);
    if (view->total > 0) {
        /* Rounded down: 100% is the end. */
        snprintf(parts->text[PERCENT], PART, "%3d%%", (int)(share_done(view) * 100));
        snprintf(parts->text[COUNT], PART, "%" PRId64 "/%" PRId64, view->done, view->total);
    } else {
        snprintf(parts->text[COUNT], sizeof parts->text[COUNT], "%" PRId64 " %s", view->done, unit);
    }
    put_rate(parts, view, unit);
    put_clock(parts, view);
    if (!isnan(view->loss))
        snprintf(parts->text[LOSS], PART, "loss %.4g", view->loss);
    for (int part = 0; part < PARTS; part++) {
        char copy[4 * PART];
        parts->columns[part] = copy_text(copy, sizeof copy, parts->text[part], 4 * PART);
    }
}

/* Eighths of a column. */
static int put_bar(char *text, double share, int columns)
{
    static const char *const eighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
    int filled = (int)(share * columns * 8), column = 0;
    char *at = text;
    for (; column < filled / 8; column++)
        at = stpcpy(at, "█");
    if (filled % 8) {
        at = stpcpy(at, eighths[filled % 8]);
        column++;
    }
    for (; column < columns; column++)
        *at++ = ' ';
    *at = '\0';
    return columns;
}

/* ---- The line -------------------------------------------------------------------------------- */

/* Between two parts there are two columns, one on each side of the bar. */
static int total_columns(const struct parts *parts)
{
    int total = 0, before = -1;
    for (int part = 0; part < PARTS; part++) {
        if (!parts->columns[part])
            continue;
        bool beside_bar = part == BAR || before == BAR;
        total += (before < 0 ? 0 : beside_bar ? 1 : 2) + parts->columns[part];
        before = part;
    }
    return total;
}

size_t td__progress_line(char *line, size_t capacity, const struct td__progress_view *view,
                         int width)
{
    static const enum part order[] = {RATE, COUNT, TIME, PERCENT, LOSS};
    struct parts parts;
    put_parts(&parts, view, width);
    for (size_t i = 0; i < sizeof order / sizeof *order && total_columns(&parts) > width; i++)
        parts.columns[order[i]] = 0;
    if (view->total > 0) {
        parts.columns[BAR] = 1; /* to count the space around it */
        int left = width - (total_columns(&parts) - 1);
        parts.columns[BAR] = left < LEAST_BAR ? 0
                                              : put_bar(parts.text[BAR], share_done(view),
                                                        left < MOST_BAR ? left : MOST_BAR);
    }
    size_t used = 0;
    int before = -1;
    line[0] = '\0';
    for (int part = 0; part < PARTS; part++) {
        if (!parts.columns[part])
            continue;
        bool beside_bar = part == BAR || before == BAR;
        int length = snprintf(line + used, capacity - used, "%s%s",
                              before < 0   ? ""
                              : beside_bar ? " "
                                           : "  ",
                              parts.text[part]);
        if (length < 0 || (size_t)length >= capacity - used) {
            line[used] = '\0';
            break;
        }
        used += (size_t)length;
        before = part;
    }
    return used;
}
