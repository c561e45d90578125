/* Texts in memory of a fixed size; see text.h. */
#include "base/text.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
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

size_t td__utf8_length(const char *at, const char *end)
{
    const unsigned char *s = (const unsigned char *)at;
    size_t left = (size_t)(end - at);
    if (left == 0)
        return 0;
    if (s[0] < 0x80)
        return 1;
    size_t length = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || length > left)
        return 0;
    for (size_t i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    bool too_long = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool surrogate = s[0] == 0xed && s[1] >= 0xa0, beyond = s[0] == 0xf4 && s[1] >= 0x90;
    return too_long || surrogate || beyond ? 0 : length;
}

char *td__text_copy(const void *data, size_t size)
{
    char *copy = malloc(size + 1);
    if (copy) {
        memcpy(copy, data, size);
        copy[size] = 0;
    }
    return copy;
}
