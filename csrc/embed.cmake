# cmake -DINPUT=gather.fatbin -DOUTPUT=gather_fatbin.cpp -P embed.cmake: a file as an array.
file(READ ${INPUT} bytes HEX)
string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
file(WRITE ${OUTPUT} "extern \"C\" {
extern const unsigned char hst_gather_fatbin[];
alignas(16) const unsigned char hst_gather_fatbin[] = {${bytes}};
}
")
