/* CRIU's pagemap images: magic numbers, a head, then an entry for each range of pages (criu/include/magic.h, pagemap.proto). */
#include "image_reader.h"
#include "lazy_fill.h"

#include <stdlib.h>
#include <string.h>

#define PAGEMAP_MAGIC 0x56084025u

#define PE_PARENT 1u
#define PE_LAZY 2u
#define PE_PRESENT 4u

#define FIELDS 6 /* those of 1 to 5 are looked at */

/* All messages here are of whole numbers. */
static bool read_message(struct reader *reader, uint64_t fields[FIELDS])
{
	struct reader message;
	uint32_t size;

	if (!read_u32(reader, &size) || size > (size_t)(reader->end - reader->at))
		return false;
	message = (struct reader){ reader->at, reader->at + size };
	reader->at += size;
	return read_fields(message, fields, FIELDS);
}

static bool add(struct phos_lazy_pages *pages, size_t *room, struct phos_lazy_run run)
{
	struct phos_lazy_run *last = pages->count ? &pages->runs[pages->count - 1] : NULL;

	if (last && last->address + last->size == run.address && last->offset + last->size == run.offset) {
		last->size += run.size;
		return true;
	}
	if (pages->count == *room) {
		size_t more = *room ? 2 * *room : 1024;
		void *larger = realloc(pages->runs, more * sizeof(*pages->runs));

		if (!larger)
			return false;
		pages->runs = larger;
		*room = more;
	}
	pages->runs[pages->count++] = run;
	return true;
}

__attribute__((visibility("default"))) int phos_lazy_decode(const void *image, size_t size, struct phos_lazy_pages *pages)
{
	struct reader reader = { image, (const unsigned char *)image + size };
	uint64_t fields[FIELDS], offset = 0;
	size_t room = 0;

	*pages = (struct phos_lazy_pages){ 0 };
	if (!read_magic(&reader, PAGEMAP_MAGIC) || !read_message(&reader, fields) || fields[1] > UINT32_MAX)
		return -1;
	pages->pages_id = (uint32_t)fields[1];
	while (reader.at < reader.end) {
		uint64_t address, count, flags, bytes;

		if (!read_message(&reader, fields))
			goto fail;
		/* CRIU 4.2 counts in a field of 64 bits, and leaves the older one 0 then. */
		address = fields[1], count = fields[5] ? fields[5] : fields[2], flags = fields[4];
		if (!flags) /* of before CRIU 3, which has nothing that is lazy */
			goto fail;
		if (address % PAGE || count > (UINT64_MAX - address) / PAGE)
			goto fail;
		if (!(flags & PE_PRESENT))
			continue;
		if ((flags & PE_PARENT) || fields[3])
			goto fail;
		bytes = count * PAGE;
		if (bytes > INT64_MAX - offset)
			goto fail;
		if ((flags & PE_LAZY) && bytes && !add(pages, &room, (struct phos_lazy_run){ address, offset, bytes }))
			goto fail;
		offset += bytes;
	}
	return 0;
fail:
	free(pages->runs);
	*pages = (struct phos_lazy_pages){ 0 };
	return -1;
}
