/* Texts in memory of a fixed size; see text.h. */
#include "base/text.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

void td__text_add(char *text, size_t room, const char *format, ...)
{
    size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, room - used, format, args);
    va_end(args);
}

bool td__text_read(const char *path, char *text, size_t room)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, room - 1);
    if (fd >= 0)
        close(fd);
    if (size > 0 && text[size - 1] == '\n')
        size--;
    text[size > 0 ? size : 0] = 0;
    return size > 0;
}
