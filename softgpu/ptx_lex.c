/* Characters to tokens. Never reads at or past p->end, whatever the text holds. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "ptx_parse.h"

void ptx_fail(struct ptx_parser *p, uint32_t line, const char *format, ...) {
    if (p->log_size != 0) {
        int used = snprintf(p->log, p->log_size, "line %u: ", line);
        if (used > 0 && (size_t)used < p->log_size) {
            va_list args;
            va_start(args, format);
            vsnprintf(p->log + used, p->log_size - (size_t)used, format, args);
            va_end(args);
        }
    }
    if (p->error == 0) p->error = PTX_INVALID_PTX;
    longjmp(p->fail, 1);
}

static bool word_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' || c == '%'; }
static bool digit(char c) { return c >= '0' && c <= '9'; }
static bool word_part(char c) { return word_start(c) || digit(c); }
static char peek(const struct ptx_parser *p, size_t ahead) { return (size_t)(p->end - p->p) > ahead ? p->p[ahead] : '\0'; }

void ptx_skip_line(struct ptx_parser *p) {
    while (p->p < p->end && *p->p != '\n') p->p++;
}

static void skip_blank(struct ptx_parser *p) {
    while (p->p < p->end) {
        char c = *p->p;
        if (c == '\n') {
            p->line++;
            p->p++;
        } else if (c == ' ' || c == '\t' || c == '\r' || c == '\f' || c == '\v') {
            p->p++;
        } else if (c == '/' && peek(p, 1) == '/') {
            ptx_skip_line(p);
        } else if (c == '/' && peek(p, 1) == '*') {
            uint32_t start = p->line;
            p->p += 2;
            while (!(peek(p, 0) == '*' && peek(p, 1) == '/')) {
                if (p->p >= p->end) ptx_fail(p, start, "this comment has no end");
                if (*p->p == '\n') p->line++;
                p->p++;
            }
            p->p += 2;
        } else {
            return;
        }
    }
}

static int hex_digit(char c) {
    if (digit(c)) return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* 0f and 0d carry the bits of a float; both are kept as bits in `integer` and as a value in `real`. */
static void lex_float_bits(struct ptx_parser *p, uint32_t digits) {
    p->p += 2;
    uint64_t bits = 0;
    for (uint32_t i = 0; i < digits; i++) {
        int d = hex_digit(peek(p, 0));
        if (d < 0) ptx_fail(p, p->line, "a floating-point constant needs %u hexadecimal digits", digits);
        bits = bits << 4 | (uint64_t)d;
        p->p++;
    }
    p->t.kind = PTX_T_FLOAT;
    p->t.float_width = digits / 2;
    p->t.integer = bits;
    if (digits == 8) {
        uint32_t narrow = (uint32_t)bits;
        float f;
        memcpy(&f, &narrow, sizeof f);
        p->t.real = (double)f;
    } else {
        memcpy(&p->t.real, &bits, sizeof bits);
    }
}

static void lex_number(struct ptx_parser *p) {
    char second = peek(p, 1);
    if (*p->p == '0' && (second == 'f' || second == 'F')) {
        lex_float_bits(p, 8);
        return;
    }
    if (*p->p == '0' && (second == 'd' || second == 'D')) {
        lex_float_bits(p, 16);
        return;
    }
    uint32_t base = 10;
    if (*p->p == '0' && (second == 'x' || second == 'X')) {
        base = 16;
        p->p += 2;
    } else if (*p->p == '0' && (second == 'b' || second == 'B')) {
        base = 2;
        p->p += 2;
    }
    const char *start = p->p;
    if (base == 10) {
        const char *q = start;
        while (q < p->end && digit(*q)) q++;
        bool real = q < p->end && (*q == '.' || *q == 'e' || *q == 'E');
        if (real) {
            char text[64];
            size_t n = 0;
            while (start + n < p->end && n + 1 < sizeof text) {
                char c = start[n];
                bool sign = (c == '+' || c == '-') && n > 0 && (start[n - 1] == 'e' || start[n - 1] == 'E');
                if (!digit(c) && c != '.' && c != 'e' && c != 'E' && !sign) break;
                text[n++] = c;
            }
            text[n] = '\0';
            char *stop;
            p->t.real = strtod(text, &stop);
            if (stop == text) ptx_fail(p, p->line, "this number cannot be read");
            p->p += stop - text;
            p->t.kind = PTX_T_FLOAT;
            p->t.float_width = 0;
            memcpy(&p->t.integer, &p->t.real, sizeof p->t.integer);
            return;
        }
        if (*start == '0' && q - start > 1) base = 8;
    }
    uint64_t value = 0;
    uint32_t digits = 0;
    for (;; p->p++, digits++) {
        int d = hex_digit(peek(p, 0));
        if (d < 0 || (uint32_t)d >= base) break;
        if (value > (UINT64_MAX - (uint64_t)d) / base) ptx_fail(p, p->line, "this number does not fit in 64 bits");
        value = value * base + (uint64_t)d;
    }
    if (digits == 0) ptx_fail(p, p->line, "this number has no digits");
    if (peek(p, 0) == 'U') p->p++;
    p->t.kind = PTX_T_INT;
    p->t.integer = value;
}

void ptx_next(struct ptx_parser *p) {
    skip_blank(p);
    p->t = (struct ptx_token){.kind = PTX_T_END, .line = p->line};
    if (p->p >= p->end) return;
    const char *start = p->p;
    char c = *start;
    if (word_start(c)) {
        p->t.kind = PTX_T_WORD;
        p->p++;
        while (p->p < p->end && word_part(*p->p)) p->p++;
        p->t.text = (struct ptx_str){start, (uint32_t)(p->p - start)};
    } else if (c == '.' && word_part(peek(p, 1))) {
        p->t.kind = PTX_T_DOT;
        p->p++;
        while (p->p < p->end) {
            if (word_part(*p->p)) p->p++;
            else if (*p->p == ':' && peek(p, 1) == ':' && word_part(peek(p, 2))) p->p += 2;
            else break;
        }
        p->t.text = (struct ptx_str){start + 1, (uint32_t)(p->p - start - 1)};
    } else if (digit(c)) {
        lex_number(p);
    } else if (c == '"') {
        p->p++;
        while (p->p < p->end && *p->p != '"') {
            if (*p->p == '\n') ptx_fail(p, p->line, "this string has no end");
            if (*p->p == '\\' && p->end - p->p > 1) p->p++;
            p->p++;
        }
        if (p->p >= p->end) ptx_fail(p, p->t.line, "this string has no end");
        p->t.kind = PTX_T_STRING;
        p->t.text = (struct ptx_str){start + 1, (uint32_t)(p->p - start - 1)};
        p->p++;
    } else if (strchr("@{}[]()<>,;:=!+-*/%&|^~?", c) != NULL && c != '\0') {
        p->t.kind = PTX_T_PUNCT;
        p->t.punct = c;
        p->t.text = (struct ptx_str){start, 1};
        p->p++;
    } else {
        ptx_fail(p, p->line, "the character with code %u has no meaning here", (unsigned)(unsigned char)c);
    }
}

bool ptx_at(const struct ptx_parser *p, char punct) { return p->t.kind == PTX_T_PUNCT && p->t.punct == punct; }

bool ptx_accept(struct ptx_parser *p, char punct) {
    if (!ptx_at(p, punct)) return false;
    ptx_next(p);
    return true;
}

void ptx_expect(struct ptx_parser *p, char punct) {
    if (ptx_accept(p, punct)) return;
    uint32_t n = p->t.text.n > 40 ? 40 : p->t.text.n;
    if (p->t.kind == PTX_T_END) ptx_fail(p, p->t.line, "the text ends where '%c' was expected", punct);
    ptx_fail(p, p->t.line, "'%c' was expected before '%.*s'", punct, (int)n, n ? p->t.text.s : "");
}

struct ptx_str ptx_word(struct ptx_parser *p, const char *what) {
    if (p->t.kind != PTX_T_WORD) ptx_fail(p, p->t.line, "%s was expected here", what);
    struct ptx_str s = p->t.text;
    ptx_next(p);
    return s;
}
