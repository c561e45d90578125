#include "ddp_timeline.h"

#include <stdio.h>

enum { WIDTH = 900, LEFT = 90, RIGHT = 20, TOP = 60, ROW = 46, BAR = 30 };

double ddp_timeline_start(const struct ddp_timeline *timeline, int bucket)
{
    double ready = timeline->ready[bucket], before = bucket ? timeline->end[bucket - 1] : ready;
    return ready > before ? ready : before;
}

double ddp_timeline_reduction(const struct ddp_timeline *timeline)
{
    double sum = 0;
    for (int i = 0; i < timeline->buckets; i++)
        sum += timeline->end[i] - ddp_timeline_start(timeline, i);
    return sum;
}

double ddp_timeline_hidden(const struct ddp_timeline *timeline)
{
    double sum = 0;
    for (int i = 0; i < timeline->buckets; i++) {
        double start = ddp_timeline_start(timeline, i), end = timeline->end[i];
        end = end < timeline->backward_end ? end : timeline->backward_end;
        sum += end > start ? end - start : 0;
    }
    return sum;
}

/* ---- The picture ------------------------------------------------------------------------------------ */

static double x_of(const struct ddp_timeline *timeline, double ms)
{
    return LEFT + ms / timeline->step_end * (WIDTH - LEFT - RIGHT);
}

static void draw_bar(FILE *file, const struct ddp_timeline *timeline, int row, double start,
                     double end, const char *color, const char *text)
{
    double x = x_of(timeline, start), width = x_of(timeline, end) - x;
    int y = TOP + row * ROW;
    fprintf(
        file,
        "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"%s\" stroke=\"#fff\"/>\n", x,
        y, width > 0.5 ? width : 0.5, BAR, color);
    if (width > 16)
        fprintf(file, "<text x=\"%.1f\" y=\"%d\" fill=\"#fff\" text-anchor=\"middle\">%s</text>\n",
                x + width / 2, y + BAR / 2 + 4, text);
}

static void draw_rows(FILE *file, const struct ddp_timeline *timeline)
{
    char text[32];
    draw_bar(file, timeline, 0, 0, timeline->backward, "#7a8793", "forward");
    for (int i = 0; i <= timeline->buckets; i++) {
        double from = i ? timeline->ready[i - 1] : timeline->backward;
        double to = i < timeline->buckets ? timeline->ready[i] : timeline->backward_end;
        snprintf(text, sizeof text, "%d", i);
        draw_bar(file, timeline, 0, from, to, "#2c6fbb", i < timeline->buckets ? text : "");
    }
    double last = timeline->buckets ? timeline->end[timeline->buckets - 1] : timeline->backward_end;
    draw_bar(file, timeline, 0, last > timeline->backward_end ? last : timeline->backward_end,
             timeline->step_end, "#7a8793", "optimizer");
    for (int i = 0; i < timeline->buckets; i++) {
        snprintf(text, sizeof text, "%d", i);
        draw_bar(file, timeline, 1, ddp_timeline_start(timeline, i), timeline->end[i], "#c2571a",
                 text);
    }
}

static void draw_axis(FILE *file, const struct ddp_timeline *timeline)
{
    int bottom = TOP + 2 * ROW;
    double x = x_of(timeline, timeline->backward_end);
    fprintf(file, "<path d=\"M%.1f %dV%d\" stroke=\"#333\" stroke-dasharray=\"4 3\"/>\n", x,
            TOP - 8, bottom);
    for (int i = 0; i <= 8; i++) {
        double ms = timeline->step_end * i / 8;
        fprintf(file, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.2f</text>\n",
                x_of(timeline, ms), bottom + 16, ms);
    }
    fprintf(file, "<text x=\"%d\" y=\"%d\">ms</text>\n", LEFT - 40, bottom + 16);
}

int ddp_timeline_draw(const struct ddp_timeline *timeline, const char *title, const char *path)
{
    double all = ddp_timeline_reduction(timeline), hidden = ddp_timeline_hidden(timeline);
    FILE *file = fopen(path, "w");
    if (!file)
        return -1;
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
            "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" "
            "fill=\"#fff\"/>\n",
            WIDTH, TOP + 2 * ROW + 30);
    fprintf(file, "<text x=\"10\" y=\"20\" font-size=\"14\">%s</text>\n", title);
    fprintf(file,
            "<text x=\"10\" y=\"40\">all-reduce %.2f ms, of these %.0f %% behind the backward pass "
            "(blue, by bucket), which ends at the dashed line</text>\n",
            all, all > 0 ? 100 * hidden / all : 0);
    fprintf(file, "<text x=\"10\" y=\"%d\">compute</text>\n", TOP + BAR / 2 + 4);
    fprintf(file, "<text x=\"10\" y=\"%d\">all-reduce</text>\n", TOP + ROW + BAR / 2 + 4);
    draw_rows(file, timeline);
    draw_axis(file, timeline);
    fprintf(file, "</svg>\n");
    return fclose(file) ? -1 : 0;
}
