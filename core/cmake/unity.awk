# Joins test files into one source. What each file includes comes first, then each file in a namespace of its own: their
# helpers may bear the same names. Headers are guarded, so a file's own includes then add nothing to that namespace.
#   awk -f unity.awk FILE... > JOINED
FNR == 1 { files[count++] = FILENAME; folder = FILENAME; sub(/[^\/]*$/, "", folder) }
/^#include / {
  name = $2
  if (name ~ /^"/) {
    beside = folder substr(name, 2, length(name) - 2)
    if ((getline line < beside) >= 0) name = "\"" beside "\""
    close(beside)
  }
  print "#include " name
}
END { for (i = 0; i < count; ++i) print "namespace file_" i " {\n#include \"" files[i] "\"\n}" }
