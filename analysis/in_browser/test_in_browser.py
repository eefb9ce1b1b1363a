"""Tests of the HTML report in headless Chromium; skipped where there is none."""

import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import browser  # noqa: E402
from kvlab_results import style  # noqa: E402
from test_report import EVIL, WithFolder, evil, whole  # noqa: E402

# Texts of pictures that leave their picture, and the least size of one in CSS pixels.
TEXTS = """(() => {
  const out = []; let least = 99;
  for (const svg of document.querySelectorAll('figure svg')) {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    for (const text of svg.querySelectorAll('text')) {
      const t = text.getBoundingClientRect();
      least = Math.min(least, parseFloat(getComputedStyle(text).fontSize) * scale);
      if (t.left < box.left - 3 || t.right > box.right + 3 || t.top < box.top - 3 || t.bottom > box.bottom + 3)
        out.push(text.textContent);
    }
  }
  return {out, least};
})()"""
# Captions that do not end inside the box that scrolls their table.
CUT_CAPTIONS = """(() => {
  const out = [];
  document.querySelectorAll('details').forEach(d => d.open = true);
  for (const box of document.querySelectorAll('.scroll')) {
    const right = box.getBoundingClientRect().right, range = document.createRange();
    range.selectNodeContents(box.querySelector('caption'));
    for (const line of range.getClientRects())
      if (line.right > right + 1) { out.push(box.querySelector('caption').textContent); break; }
  }
  document.querySelectorAll('details').forEach(d => d.open = false);
  return out;
})()"""
COLOURS = """[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
  getComputedStyle(document.querySelector('figure svg text')).fill]"""


@unittest.skipUnless(browser.find(), "no Chromium")
class InABrowser(WithFolder):
    @classmethod
    def setUpClass(cls):
        cls.browser = browser.Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.__exit__()

    def setUp(self):
        super().setUp()
        self.path = self.folder / "page.html"
        self.browser.requests.clear()
        self.browser.errors.clear()

    def test_it_is_readable_at_any_width_and_in_both_modes(self):
        self.path.write_text(whole())
        for width in (320, 390, 1200):
            for dark in (False, True):
                self.browser.show(self.path, width, dark)
                self.assertLessEqual(self.browser.run("document.documentElement.scrollWidth"), width)
                self.assertEqual(self.browser.run(CUT_CAPTIONS), [], width)
                texts = self.browser.run(TEXTS)
                self.assertEqual(texts["out"], [], width)
                self.assertGreaterEqual(texts["least"], 10)
                found = [
                    f"#{int(r):02x}{int(g):02x}{int(b):02x}"
                    for r, g, b in (re.findall(r"\d+", c)[:3] for c in self.browser.run(COLOURS))
                ]
                self.assertEqual(found, [style.PAGE["surface"][dark], style.PAGE["ink"][dark], style.PAGE["ink"][dark]])
        self.assertEqual(set(self.browser.requests), {self.path.as_uri()})
        self.assertEqual(self.browser.errors, [])

    def test_every_picture_has_ink(self):
        self.path.write_text(whole())
        self.browser.show(self.path, 1200)
        sizes = self.browser.run(
            "[...document.querySelectorAll('figure svg')].map(s => [s.getBoundingClientRect().width,"
            " s.getBoundingClientRect().height, s.querySelectorAll('path, use').length])"
        )
        self.assertGreater(len(sizes), 20)
        for width, height, shapes in sizes:
            self.assertGreater(min(width, height), 80)
            self.assertGreater(shapes, 3)

    def test_text_of_files_does_nothing(self):
        self.path.write_text(evil(self.folder))
        self.browser.show(self.path, 390)
        self.assertEqual(self.browser.run("document.title"), "kvlab report: e")
        self.assertEqual(self.browser.run("document.scripts.length"), 0)
        self.assertIn(EVIL, self.browser.run("document.body.textContent"))
        self.assertLessEqual(self.browser.run("document.documentElement.scrollWidth"), 390)
        self.assertEqual(self.browser.errors, [])


if __name__ == "__main__":
    unittest.main()
