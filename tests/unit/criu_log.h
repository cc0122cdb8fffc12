/* What CRIU exports to its plugins, for programs that stand for it in tests: its log, on stderr. */
#include <stdarg.h>
#include <stdio.h>

void print_on_level(unsigned int level, const char *format, ...)
{
	va_list list;

	(void)level;
	va_start(list, format);
	vfprintf(stderr, format, list);
	va_end(list);
}
