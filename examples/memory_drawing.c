/* Draws the memory of ranks over a step, stacked by kind: a column for each run, a row for each rank, all in one scale.
 *
 *              DDP                         FSDP, full_shard
 *     rank 0   ▁▃▅▇▆▄▂                     ▁▂▃▄▃▂▁
 *     rank 1   ▁▃▅▇▆▄▂                     ▁▂▃▄▃▂▁
 *              forward  backward  step     forward  backward  step */
#include "memory_drawing.h"

#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST_RUNS = 4,
    MOST_ROWS = 8,
    KINDS = 5,
    LEFT = 76,
    TOP = 112,
    COLUMN = 400,
    GAP = 26,
    BOTTOM = 44,
};

static const char *const names[KINDS] = {"parameters", "optimizer", "gradients",
                                         "whole parameters and gradients of units", "activations"};
static const char *const colors[KINDS] = {"#3b6fb6", "#8e6bbf", "#e0912f", "#1f9e89", "#c3cad5"};

void memory_run_free(struct memory_run *run)
{
    free(run->samples);
    free(run->levels);
}

/* ---- Files of numbers ------------------------------------------------------------------------------------ */

static const char head[] =
    "rank,ms,part,parameters,optimizer,gradients,whole,activations,peak of the rank\n";

static td_status fail(const char *path)
{
    return td_fail(TD_ERR_SYSTEM, "%s: %s", path, strerror(errno));
}

static td_status write_numbers(const char *path, const struct memory_run *run)
{
    FILE *file = fopen(path, "w");
    if (!file)
        return fail(path);
    fputs(head, file);
    for (int r = 0; r < run->ranks; r++)
        for (int64_t i = 0; i < run->count; i++) {
            const struct memory_sample *at = &run->samples[r * run->count + i];
            const struct memory_levels *level = &run->levels[r];
            fprintf(file, "%d,%.3f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f,%.0f\n", r, (double)at->ms,
                    (double)at->part, level->parameters, level->state, level->gradients,
                    (double)at->whole, (double)at->activations, level->peak);
        }
    bool bad = ferror(file);
    return fclose(file) || bad ? fail(path) : TD_OK;
}

static bool read_line(FILE *file, struct memory_run *run, int64_t line)
{
    struct memory_sample sample;
    struct memory_levels level;
    int rank;
    if (fscanf(file, "%d,%f,%f,%lf,%lf,%lf,%f,%f,%lf", &rank, &sample.ms, &sample.part,
               &level.parameters, &level.state, &level.gradients, &sample.whole,
               &sample.activations, &level.peak) != 9 ||
        rank < 0 || rank > run->ranks)
        return false;
    struct memory_sample *samples = realloc(run->samples, (size_t)(line + 1) * sizeof *samples);
    run->samples = samples ? samples : run->samples;
    struct memory_levels *levels = realloc(run->levels, (size_t)(rank + 1) * sizeof *levels);
    run->levels = levels ? levels : run->levels;
    if (!samples || !levels)
        return false;
    samples[line] = sample;
    levels[rank] = level;
    run->ranks = rank + 1;
    return true;
}

/* memory-<name>.csv; false if it is something else. */
static bool read_numbers(const char *directory, const char *entry, struct memory_run *run)
{
    char path[4096], line[sizeof head];
    *run = (struct memory_run){.ranks = 0};
    if (sscanf(entry, "memory-%40[^.].csv", run->name) != 1)
        return false;
    snprintf(path, sizeof path, "%s/%s", directory, entry);
    FILE *file = fopen(path, "r");
    int64_t lines = 0;
    if (file && fgets(line, sizeof line, file) && !strcmp(line, head))
        while (read_line(file, run, lines))
            lines++;
    if (file)
        fclose(file);
    run->count = run->ranks ? lines / run->ranks : 0;
    if (run->count && run->count * run->ranks == lines)
        return true;
    memory_run_free(run);
    return false;
}

static int is_numbers(const struct dirent *entry)
{
    size_t length = strlen(entry->d_name);
    return !strncmp(entry->d_name, "memory-", 7) && length > 11 &&
           !strcmp(entry->d_name + length - 4, ".csv");
}

static int read_all(const char *directory, struct memory_run *runs)
{
    struct dirent **entries;
    int found = scandir(directory, &entries, is_numbers, alphasort), count = 0;
    for (int i = 0; i < found; i++) {
        if (count < MOST_RUNS && read_numbers(directory, entries[i]->d_name, &runs[count]))
            count++;
        free(entries[i]);
    }
    if (found >= 0)
        free(entries);
    return count;
}

/* ---- The drawing -------------------------------------------------------------------------------------------- */

struct drawing {
    FILE *file;
    const struct memory_run *runs;
    int count, rows, row_height;
    double most;  /* bytes: the top of a row */
    double scale; /* of a KiB, MiB or GiB */
    const char *unit;
};

static void text(const struct drawing *drawing, double x, double y, const char *style,
                 const char *value)
{
    fprintf(drawing->file, "<text x=\"%.1f\" y=\"%.1f\" %s>%s</text>\n", x, y, style, value);
}

/* 1, 2 or 5 times a power of ten: at most four lines a row. */
static double tick_of(const struct drawing *drawing)
{
    double tick = 1e-3, most = drawing->most / drawing->scale;
    for (int i = 0; most / tick > 4; i++)
        tick *= i % 3 == 1 ? 2.5 : 2;
    return tick;
}

static double height_at(const struct drawing *drawing, double bytes)
{
    return drawing->row_height * bytes / drawing->most;
}

static double value_of(const struct memory_run *run, int row, int64_t i, int kind)
{
    const struct memory_sample *sample = &run->samples[row * run->count + i];
    const struct memory_levels *level = &run->levels[row];
    const double values[KINDS] = {level->parameters, level->state, level->gradients,
                                  (double)sample->whole, (double)sample->activations};
    return values[kind];
}

/* The sum of the kinds up to this one. */
static double sum_of(const struct memory_run *run, int row, int64_t i, int kind)
{
    double sum = 0;
    for (int k = 0; k <= kind; k++)
        sum += value_of(run, row, i, k);
    return sum;
}

static double duration_of(const struct memory_run *run)
{
    double most = 1e-3;
    for (int64_t i = 0; i < run->count * run->ranks; i++)
        if ((double)run->samples[i].ms > most)
            most = (double)run->samples[i].ms;
    return most;
}

/* From one kind's sum to the next, in steps: memory changes at a moment. */
static void draw_area(const struct drawing *drawing, const struct memory_run *run, int row,
                      int kind, double left, double bottom)
{
    double duration = duration_of(run), y = 0;
    const struct memory_sample *samples = &run->samples[row * run->count];
    fprintf(drawing->file, "<path fill=\"%s\" d=\"M%.1f %.1f", colors[kind], left, bottom);
    for (int64_t i = 0; i < run->count; i++) {
        double x = left + COLUMN * (double)samples[i].ms / duration;
        double next = bottom - height_at(drawing, sum_of(run, row, i, kind));
        if (i == 0 || next - y > 0.05 || y - next > 0.05)
            fprintf(drawing->file, "H%.1fV%.1f", x, y = next);
    }
    fprintf(drawing->file, "H%d", (int)left + COLUMN);
    fprintf(drawing->file, "V%.1fZ\"/>\n", bottom);
}

static void draw_grid(const struct drawing *drawing, double left, double bottom, bool labels)
{
    double tick = tick_of(drawing);
    fprintf(drawing->file,
            "<rect x=\"%.1f\" y=\"%.1f\" width=\"%d\" height=\"%d\" fill=\"#f5f6f8\"/>\n", left,
            bottom - drawing->row_height, COLUMN, drawing->row_height);
    for (double at = tick; at * drawing->scale < drawing->most; at += tick) {
        double y = bottom - height_at(drawing, at * drawing->scale);
        char value[32];
        fprintf(drawing->file,
                "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#dde1e7\"/>\n",
                left, y, left + COLUMN, y);
        snprintf(value, sizeof value, "%g", at);
        if (labels)
            text(drawing, left - 6, y + 4, "text-anchor=\"end\" fill=\"#6b7480\"", value);
    }
}

/* The parts of the step of a rank, and their names below the last row. */
static void draw_parts(const struct drawing *drawing, const struct memory_run *run, int row,
                       double left, double bottom)
{
    static const char *const parts[] = {"forward", "backward", "step"};
    const struct memory_sample *samples = &run->samples[row * run->count];
    double duration = duration_of(run);
    for (int64_t i = 0, first = 0; i < run->count; i++) {
        if (i + 1 < run->count && samples[i + 1].part == samples[i].part)
            continue;
        double from = left + COLUMN * (double)samples[first].ms / duration;
        int64_t end = i + 1 < run->count ? i + 1 : i;
        double to = left + COLUMN * (double)samples[end].ms / duration;
        if (first > 0)
            fprintf(drawing->file,
                    "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#222b36\" "
                    "stroke-opacity=\"0.35\" stroke-dasharray=\"2 3\"/>\n",
                    from, bottom - drawing->row_height, from, bottom);
        if (row == drawing->rows - 1 && to - from > 24)
            text(drawing, (from + to) / 2, bottom + 15, "text-anchor=\"middle\" fill=\"#6b7480\"",
                 parts[(int)samples[i].part]);
        first = i + 1;
    }
}

static void draw_peak(const struct drawing *drawing, const struct memory_run *run, int row,
                      double left, double bottom)
{
    double peak = run->levels[row].peak, y = bottom - height_at(drawing, peak);
    char value[64];
    fprintf(drawing->file,
            "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#c0392b\" "
            "stroke-dasharray=\"6 3\"/>\n",
            left, y, left + COLUMN, y);
    snprintf(value, sizeof value, "peak %.3g %s", peak / drawing->scale, drawing->unit);
    text(drawing, left + COLUMN - 4, y - 4, "text-anchor=\"end\" fill=\"#c0392b\"", value);
}

static void draw_run(const struct drawing *drawing, int column)
{
    const struct memory_run *run = &drawing->runs[column];
    double left = LEFT + column * (COLUMN + GAP);
    char title[512], label[64];
    bool ddp = !strcmp(run->name, "ddp") || !strcmp(run->name, "one_process");
    snprintf(title, sizeof title, "%s%s",
             ddp ? run->name[0] == 'd' ? "DDP" : "one process" : "FSDP, ", ddp ? "" : run->name);
    text(drawing, left, TOP - 24, "font-size=\"15\" font-weight=\"bold\" fill=\"#222b36\"", title);
    snprintf(label, sizeof label, "%.0f ms", duration_of(run));
    double bottom = 0;
    for (int row = 0; row < drawing->rows && row < run->ranks; row++) {
        bottom = TOP + (row + 1) * drawing->row_height + row * GAP;
        draw_grid(drawing, left, bottom, column == 0);
        for (int kind = KINDS - 1; kind >= 0; kind--)
            draw_area(drawing, run, row, kind, left, bottom);
        draw_parts(drawing, run, row, left, bottom);
        draw_peak(drawing, run, row, left, bottom);
        char rank[24];
        snprintf(rank, sizeof rank, "rank %d", row);
        text(drawing, left + 6, bottom - drawing->row_height + 15,
             "font-weight=\"bold\" fill=\"#222b36\"", rank);
    }
    text(drawing, left + COLUMN, bottom + 31, "text-anchor=\"end\" fill=\"#6b7480\"", label);
}

static void draw_legend(const struct drawing *drawing)
{
    double x = LEFT;
    char title[96];
    snprintf(title, sizeof title, "Memory of each rank over a step, %s", drawing->unit);
    text(drawing, LEFT, 30, "font-size=\"18\" fill=\"#222b36\"", title);
    for (int kind = 0; kind < KINDS; kind++) {
        fprintf(drawing->file,
                "<rect x=\"%.1f\" y=\"45\" width=\"12\" height=\"12\" rx=\"2\" fill=\"%s\"/>\n", x,
                colors[kind]);
        text(drawing, x + 17, 55, "fill=\"#222b36\"", names[kind]);
        x += 40 + 6.4 * (double)strlen(names[kind]);
    }
}

static void choose_scale(struct drawing *drawing)
{
    static const char *const units[] = {"KiB", "MiB", "GiB"};
    for (int c = 0; c < drawing->count; c++)
        for (int r = 0; r < drawing->runs[c].ranks; r++) {
            if (drawing->runs[c].levels[r].peak > drawing->most)
                drawing->most = drawing->runs[c].levels[r].peak;
            if (r < MOST_ROWS && r >= drawing->rows)
                drawing->rows = r + 1;
        }
    drawing->most *= 1.18; /* room for the label above the highest peak */
    drawing->most = drawing->most > 0 ? drawing->most : 1;
    drawing->scale = 1024;
    drawing->unit = units[0];
    for (int u = 1; u < 3 && drawing->most > 2048 * drawing->scale; u++) {
        drawing->scale *= 1024;
        drawing->unit = units[u];
    }
    drawing->row_height = drawing->rows <= 2 ? 170 : drawing->rows <= 4 ? 120 : 84;
}

static td_status draw(const char *path, const struct memory_run *runs, int count)
{
    struct drawing drawing = {.file = fopen(path, "w"), .runs = runs, .count = count};
    if (!drawing.file)
        return fail(path);
    choose_scale(&drawing);
    int width = LEFT + count * (COLUMN + GAP), least = LEFT + COLUMN * 2 - 60;
    int height = TOP + drawing.rows * (drawing.row_height + GAP) - GAP + BOTTOM;
    fprintf(drawing.file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
            "font-family=\"sans-serif\" font-size=\"12\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            width > least ? width : least, height);
    draw_legend(&drawing);
    for (int column = 0; column < count; column++)
        draw_run(&drawing, column);
    fprintf(drawing.file, "</svg>\n");
    bool bad = ferror(drawing.file);
    return fclose(drawing.file) || bad ? fail(path) : TD_OK;
}

td_status memory_drawing_write(const char *directory, const struct memory_run *run)
{
    char path[4096];
    struct memory_run runs[MOST_RUNS];
    snprintf(path, sizeof path, "%s/memory-%s.csv", directory, run->name);
    td_status status = write_numbers(path, run);
    if (status)
        return status;
    int count = read_all(directory, runs);
    snprintf(path, sizeof path, "%s/memory.svg", directory);
    status = draw(path, runs, count);
    for (int i = 0; i < count; i++)
        memory_run_free(&runs[i]);
    return status;
}
