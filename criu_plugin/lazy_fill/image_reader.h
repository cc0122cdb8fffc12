/* Reading CRIU's images: magic numbers, then messages of protobuf, each with its size before it (criu/include/magic.h). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define IMG_COMMON_MAGIC 0x54564319u

struct reader {
	const unsigned char *at, *end;
};

static inline bool read_u32(struct reader *reader, uint32_t *value)
{
	if (reader->end - reader->at < 4)
		return false;
	memcpy(value, reader->at, 4);
	reader->at += 4;
	return true;
}

static inline bool read_varint(struct reader *reader, uint64_t *value)
{
	*value = 0;
	for (unsigned shift = 0; shift < 64 && reader->at < reader->end; shift += 7) {
		unsigned char byte = *reader->at++;

		*value |= (uint64_t)(byte & 0x7f) << shift;
		if (!(byte & 0x80))
			return true;
	}
	return false;
}

/* Whether it begins as images of that kind do. */
static inline bool read_magic(struct reader *reader, uint32_t kind)
{
	uint32_t magic;

	return read_u32(reader, &magic) && magic == IMG_COMMON_MAGIC && read_u32(reader, &magic) && magic == kind;
}

/* A message of whole numbers; what is not there is 0, and those above the last are not looked at. */
static inline bool read_fields(struct reader message, uint64_t *fields, size_t count)
{
	memset(fields, 0, count * sizeof(*fields));
	while (message.at < message.end) {
		uint64_t tag, value;

		if (!read_varint(&message, &tag) || (tag & 7) || !read_varint(&message, &value))
			return false;
		if (tag >> 3 < count)
			fields[tag >> 3] = value;
	}
	return true;
}
