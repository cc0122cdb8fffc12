/* Texts for phosd: file names are bytes, protobuf's strings must be UTF-8. */
#pragma once

/* Puts a question mark in place of every byte that is not part of a well-formed character (RFC 3629). */
void phos_utf8_mend(char *text);
