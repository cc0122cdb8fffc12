/* What a test in C expects. */
#pragma once
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

static void check(bool good, const char *what, int line)
{
    if (good)
        return;
    fprintf(stderr, "line %d: not so: %s\n", line, what);
    exit(1);
}
#define CHECK(condition) check(condition, #condition, __LINE__)
