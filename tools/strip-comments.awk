# Prints FILE:LINE:CODE for every line of C++ that still holds code when comments and blanks are taken away.
FNR == 1 { inside = 0 }
{
  line = $0
  code = ""
  while (line != "") {
    if (inside) {
      end = index(line, "*/")
      if (!end) break
      line = substr(line, end + 2)
      inside = 0
    } else if (match(line, /\/\/|\/\*|"([^"\\]|\\.)*"/)) {
      piece = substr(line, RSTART, RLENGTH)
      code = code substr(line, 1, RSTART - 1)
      line = substr(line, RSTART + RLENGTH)
      if (piece == "//") break
      if (piece == "/*") inside = 1
      else code = code piece
    } else {
      code = code line
      break
    }
  }
  if (code ~ /[^ \t\r]/) print FILENAME ":" FNR ":" code
}
