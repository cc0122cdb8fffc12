#include "arguments.h"
#include "tensor_maps.h"

#include <string.h>

struct phos_arguments phos_arguments_of(void **parameters, void **extra)
{
    struct phos_arguments arguments = {.parameters = parameters};
    for (void **e = parameters ? NULL : extra; e && *e != CU_LAUNCH_PARAM_END; e += 2)
        if (*e == CU_LAUNCH_PARAM_BUFFER_POINTER)
            arguments.block = e[1];
        else if (*e == CU_LAUNCH_PARAM_BUFFER_SIZE)
            arguments.block_size = e[1] ? *(const size_t *)e[1] : 0;
        else
            break;
    return arguments;
}

static bool read_at(struct phos_look *look, uint32_t offset, void *to, uint32_t size)
{
    const struct phos_arguments *a = look->arguments;
    if (!a->parameters) {
        if (!a->block || offset > a->block_size || size > a->block_size - offset)
            return false;
        memcpy(to, (const char *)a->block + offset, size);
        return true;
    }
    if (look->at >= look->count || offset < look->parameters[look->at].offset)
        look->at = 0;
    for (; look->at < look->count; look->at++) {
        const struct phos_access_parameter *p = &look->parameters[look->at];
        if (offset < p->offset)
            return false;
        if (offset - p->offset >= p->size)
            continue;
        if (!a->parameters[look->at])
            return false;
        /* What is more lies in the next ones: an address may be passed in two halves. */
        uint32_t left = p->size - (offset - p->offset), part = size < left ? size : left;
        memcpy(to, (const char *)a->parameters[look->at] + (offset - p->offset), part);
        if (!(size -= part))
            return true;
        to = (char *)to + part;
        offset += part;
    }
    return false;
}

void phos_look_scan(struct phos_touches *touches, struct phos_look *look, uint32_t offset, uint32_t size, uint32_t access)
{
    uint64_t value;
    for (uint32_t at = (offset + 7) & ~7u; at + 8 <= offset + size; at += 8)
        if (read_at(look, at, &value, sizeof value) && value >= look->low && value <= look->high) /* or the end of it */
            phos_touches_add(touches, value, 0, access);
    CUtensorMap map;
    if (size < sizeof map || !phos_tensor_maps_any())
        return;
    for (uint32_t at = (offset + 7) & ~7u; at + sizeof map <= offset + size; at += 8) {
        CUdeviceptr address;
        if (read_at(look, at, &map, sizeof map) && phos_tensor_map_find(&map, &address))
            phos_touches_add(touches, address, 0, access);
    }
}

void phos_look_field(struct phos_touches *touches, struct phos_look *look, const struct phos_access_field *field)
{
    CUdeviceptr address;
    CUtensorMap map;
    switch (field->kind) {
    case PHOS_FIELD_POINTER:
        if (read_at(look, field->offset, &address, sizeof address))
            phos_touches_add(touches, address, 0, field->access);
        break;
    case PHOS_FIELD_TABLE:
        if (read_at(look, field->offset, &address, sizeof address))
            phos_touches_add(touches, address, 0, (uint32_t)field->access << PHOS_THROUGH);
        break;
    case PHOS_FIELD_TENSOR_MAP:
        if (!read_at(look, field->offset, &map, sizeof map))
            break;
        if (phos_tensor_map_find(&map, &address))
            phos_touches_add(touches, address, 0, field->access);
        else
            touches->anything |= field->access;
        break;
    default:
        phos_look_scan(touches, look, field->offset, field->size, field->access);
    }
}
