"""Tests of targets/peers.py where no library of it needs to be there."""

from importlib.util import find_spec
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import unittest

SCRIPT = Path(__file__).parent / "targets" / "peers.py"
sys.path.insert(0, str(SCRIPT.parent))
import peers  # noqa: E402

TORCH = find_spec("torch") is not None


class Peers(unittest.TestCase):
    def run_with(self, torch):
        """Runs the script with a module of that text in place of torch."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "torch.py").write_text(torch)
            done = subprocess.run([sys.executable, str(SCRIPT), "--small"], env={**os.environ, "PYTHONPATH": folder},
                                  capture_output=True, text=True, check=False)
        return done

    def test_without_torch_all_are_named(self):
        done = self.run_with("raise ImportError('not here')")
        self.assertEqual(done.returncode, 0, done.stderr)
        out = json.loads(done.stdout)
        self.assertEqual(out["ops"], [])
        self.assertEqual([one["kernel"] for one in out["skipped"]], list(peers.KERNELS))
        for one in out["skipped"]:
            self.assertEqual(one["why"], "torch is not installed (not here)")

    def test_shapes_fill_pages_and_exceed_the_cache_of_a_gpu(self):
        for batch, tokens in peers.SHAPES + peers.SMALL:
            self.assertEqual(tokens % peers.PAGE, 0)
        self.assertEqual(peers.cache_bytes(8, 32768), 8 * 32768 * 4096)

    @unittest.skipUnless(TORCH, "no torch")
    def test_a_token_lies_where_its_page_says(self):
        import torch

        x = peers.Inputs(torch, "cpu", 2, 64, 2)
        keys, values = x.contiguous(x.caches[1])
        for i, h, t in [(0, 0, 0), (1, 7, 63), (1, 2, 17), (0, 5, 48)]:
            page = int(x.table[i, t // peers.PAGE])
            for side, rows in enumerate((keys, values)):
                self.assertTrue(torch.equal(x.caches[0][page, side, h, t % peers.PAGE], rows[i, h, t]))

    @unittest.skipUnless(TORCH, "no torch")
    def test_with_torch_its_attention_is_timed(self):
        done = subprocess.run([sys.executable, str(SCRIPT), "--small"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = json.loads(done.stdout)["ops"]
        self.assertTrue(lines)
        for line in lines:
            self.assertEqual(line["shape"], "2 x 64")
            self.assertGreater(line["seconds_median"], 0)


if __name__ == "__main__":
    unittest.main()
