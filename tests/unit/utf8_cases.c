/* Reads lines from standard input and writes them mended: the test compares with what Python says. */
#include "utf8.h"

#include <stdio.h>
#include <string.h>

int main(void)
{
    char line[4096];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        phos_utf8_mend(line);
        puts(line);
    }
    return 0;
}
