# Rewrites the CUDA C++ that no macro can express into C++ on the emulator:
#   kernel<<<grid, block, ...>>>(arguments);   ->  ::emulator::start("kernel", kernel, grid, block, ...)(arguments);
#   extern __shared__ __align__(N) T x[];      ->  T* x = a pointer to the block's dynamic shared memory
#   __shared__ T x, y[2];                      ->  references to the block's own x and y
#   const __grid_constant__ T x                ->  const T &x: threads share a kernel's arguments instead of copying them
# Line numbers stay the same. A form whose tokens break across lines is an error of the compiler.
function shared_arguments(text,   mark, at, out, depth, i, c, piece) {
  mark = "const __grid_constant__ "
  while ((at = index(text, mark)) > 0) {
    out = out substr(text, 1, at + length(mark) - 1)
    text = substr(text, at + length(mark))
    depth = 0
    for (i = 1; i <= length(text); ++i) {
      c = substr(text, i, 1)
      if (c == "<") ++depth
      if (c == ">") --depth
      if ((c == "," || c == ")") && depth == 0) break
    }
    piece = substr(text, 1, i - 1)
    if (i <= length(text)) sub(/[A-Za-z_0-9]+$/, "\\&&", piece)
    out = out piece
    text = substr(text, i)
  }
  return out text
}
FNR == 1 { print "#line 1 \"" FILENAME "\"" }
/^[ \t]*extern __shared__ / {
  text = $0
  sub(/^[ \t]*extern __shared__ /, "", text)
  alignment = ""
  if (match(text, /^__align__\([0-9]+\) /)) {
    alignment = substr(text, 11, RLENGTH - 12)
    text = substr(text, RLENGTH + 1)
  }
  sub(/\[\];.*/, "", text)
  name = text
  sub(/.* /, "", name)
  type = substr(text, 1, length(text) - length(name) - 1)
  if (alignment == "") alignment = "alignof(" type ")"
  print type "* " name " = static_cast<" type "*>(::emulator::dynamic_shared(" alignment "));"
  next
}
/^[ \t]*__shared__ / {
  text = $0
  sub(/^[ \t]*__shared__ /, "", text)
  sub(/;.*/, "", text)
  names = text
  sub(/^[A-Za-z_0-9:]+ /, "", names)
  gsub(/\[[^]]*\]/, "", names)
  print "struct Shared" FNR " { " text "; }; auto& [" names "] = ::emulator::static_shared<Shared" FNR ">();"
  next
}
{
  while (match($0, /[A-Za-z_][A-Za-z_0-9]*<<</)) {
    name = substr($0, RSTART, RLENGTH - 3)
    $0 = substr($0, 1, RSTART - 1) "::emulator::start(\"" name "\", " name ", " substr($0, RSTART + RLENGTH)
  }
  gsub(/>>>\(/, ")(")
  print shared_arguments($0)
}
