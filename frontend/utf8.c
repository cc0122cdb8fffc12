#include "utf8.h"

#include <stdbool.h>

/* How many bytes after a leading one; -1: it leads nothing. */
static int followers(unsigned char byte)
{
    return byte < 0x80 ? 0 : byte < 0xC2 ? -1 : byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : byte < 0xF5 ? 3 : -1;
}

/* The first byte after the leading one has a narrower range where the form would be overlong, a surrogate or too large. */
static bool second_fits(unsigned char lead, unsigned char second)
{
    unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    return second >= low && second <= high;
}

void phos_utf8_mend(char *text)
{
    unsigned char *at = (unsigned char *)text;
    while (*at) {
        int wanted = followers(*at), found = 0;
        while (found < wanted && (found ? (at[found + 1] & 0xC0) == 0x80 : second_fits(*at, at[1])))
            found++; /* the end of the text follows nothing: it is not read past */
        if (wanted < 0 || found < wanted)
            *at++ = '?';
        else
            at += wanted + 1;
    }
}
