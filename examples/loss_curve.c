/* The losses of a training, as a list and as a line through the means of groups of steps. */
#include "loss_curve.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

struct curve {
    const char *title;
    const float *losses;
    int64_t count, first;
};

enum { WIDTH = 720, HEIGHT = 300, LEFT = 50, RIGHT = 20, TOP = 30, BOTTOM = 40, POINTS = 240 };

static void draw_line(FILE *file, const struct curve *curve, double highest)
{
    int64_t points = curve->count < POINTS ? curve->count : POINTS;
    fprintf(file, "<polyline fill=\"none\" stroke=\"#1f77b4\" stroke-width=\"1.5\" points=\"");
    for (int64_t p = 0; p < points; p++) {
        int64_t from = p * curve->count / points, to = (p + 1) * curve->count / points;
        double sum = 0;
        for (int64_t i = from; i < to; i++)
            sum += (double)curve->losses[i];
        double value = sum / (double)(to - from);
        fprintf(file, "%.1f,%.1f ",
                LEFT + (WIDTH - RIGHT - LEFT) * ((double)p + 0.5) / (double)points,
                HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / highest);
    }
    fprintf(file, "\"/>\n");
}

static void draw(FILE *file, const struct curve *curve)
{
    float highest = 0;
    for (int64_t i = 0; i < curve->count; i++)
        highest = curve->losses[i] > highest ? curve->losses[i] : highest;
    highest = highest > 0 ? highest : 1;
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
            "font-family=\"sans-serif\" font-size=\"12\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
            "<text x=\"%d\" y=\"20\" font-size=\"14\">%s</text>\n",
            WIDTH, HEIGHT, LEFT, curve->title);
    for (int tick = 0; tick <= 4; tick++) {
        double y = HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * tick / 4.0;
        fprintf(file,
                "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#ddd\"/>"
                "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.2f</text>\n",
                LEFT, y, WIDTH - RIGHT, y, LEFT - 6, y + 4, (double)highest * tick / 4);
    }
    draw_line(file, curve, (double)highest);
    fprintf(file,
            "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">step (%lld to %lld)</text>\n</svg>\n",
            (WIDTH + LEFT) / 2, HEIGHT - 12, (long long)curve->first,
            (long long)(curve->first + curve->count - 1));
}

static void list(FILE *file, const struct curve *curve)
{
    fprintf(file, "step,loss\n");
    for (int64_t i = 0; i < curve->count; i++)
        fprintf(file, "%lld,%.9g\n", (long long)(curve->first + i), (double)curve->losses[i]);
}

static int write_file(const struct curve *curve, const char *directory, const char *name,
                      void (*write)(FILE *file, const struct curve *curve))
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "w");
    if (file)
        write(file, curve);
    if (!file || ferror(file) | fclose(file)) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return 1;
    }
    return 0;
}

int loss_curve_write(const char *directory, const char *title, const float *losses, int64_t count,
                     int64_t first)
{
    struct curve curve = {.title = title, .losses = losses, .count = count, .first = first};
    return write_file(&curve, directory, "loss.svg", draw) ||
           write_file(&curve, directory, "loss.csv", list);
}
