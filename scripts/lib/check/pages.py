"""Open report pages in Chromium and take screenshots: phone and desktop, light and dark, and one print layout.

    scripts/check pages [--out FOLDER] PAGE.html…

Fails if a page logs an error, requests anything but itself, is wider than the window, clips a label, has
overlapping labels, or takes more than three seconds to open in each of three attempts. Chromium must be installed
(Debian: `apt-get install chromium`); $CHROMIUM names another binary.
"""

import argparse
import sys
import time
from pathlib import Path

from lib import browser

WIDTHS = {"phone": 390, "desk": 1280}
# Seconds until a page is visible. An idle, slow machine of two cores needs two for the largest page.
LIMIT = 3
# Finds layout problems of a rendered page.
CHECKS = """() => {
  const found = [];
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  if (wide > 0) found.push(`is ${wide} pixels wider than the window`);
  const visible = (node) => node.getClientRects().length > 0;
  for (const node of document.querySelectorAll('.tick, .figure, .card p, .point, .bar-value, .track-value, .track-label, figcaption, h1, h2')) {
    const box = node.getBoundingClientRect();
    if (visible(node) && (box.left < -0.5 || box.right > innerWidth + 0.5)) found.push(`'${node.textContent}' is outside the window`);
    if (visible(node) && node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).display !== 'inline') found.push(`'${node.textContent}' is cut off`);
  }
  for (const group of document.querySelectorAll('.area, .track-axis')) {
    const ticks = [...group.querySelectorAll('.tick')].map((node) => [node.textContent, node.getBoundingClientRect()]);
    ticks.forEach(([a, p], i) => ticks.slice(i + 1).forEach(([b, q]) => {
      if (p.left < q.right && q.left < p.right && p.top < q.bottom - 2 && q.top < p.bottom - 2) found.push(`'${a}' overlaps '${b}'`);
    }));
  }
  return found;
}"""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("target/screenshots"))
    return parser.parse_args()


def opening(page, address):
    """Seconds until the page is visible: the least of up to three attempts, because other programs may run."""
    least = float("inf")
    for _ in range(3):
        start = time.monotonic()
        page.goto(address, wait_until="load")
        # The first frame is on the screen when the second one is requested.
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        least = min(least, time.monotonic() - start)
        if least <= LIMIT:
            break
    return least


def look(chromium, page_path, out):
    """Problems of one page."""
    complaints = []
    for name, width in WIDTHS.items():
        for scheme in ("light", "dark"):
            page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            where = f"{page_path.name}, {name}, {scheme}"
            page.on("console", lambda message: complaints.append(f"{where}: {message.type}: {message.text}") if message.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: complaints.append(f"{where}: {error}"))
            page.on("request", lambda request: complaints.append(f"{where}: requests {request.url}") if request.url != page_path.as_uri() else None)
            seconds = opening(page, page_path.as_uri())
            if seconds > LIMIT:
                complaints.append(f"{where}: takes {seconds:.1f} s to open")
            complaints += [f"{where}: {found}" for found in page.evaluate(CHECKS)]
            stem = f"{page_path.parent.name}-{page_path.stem}"
            page.screenshot(path=out / f"{stem}-{name}-{scheme}.png", full_page=True)
            used = use(page)
            if used:
                complaints.append(f"{where}: {used}")
            if name == "desk":
                page.screenshot(path=out / f"{stem}-{name}-{scheme}-used.png")
            print(f"{where}: opened in {seconds:.2f} s, {page_path.stat().st_size / 1e6:.2f} MB")
            if (name, scheme) == ("desk", "light"):
                page.pdf(path=out / f"{stem}.pdf", format="A4", print_background=True)
            page.close()
    return complaints


def use(page):
    """Tests sorting, filtering and hovering over a weight; returns problems."""
    if page.locator("#weights-table").count() == 0:
        return None
    page.locator("[data-order='6']").click()
    figures = page.eval_on_selector_all("#weights-table tbody tr", "rows => rows.map((row) => row.cells[6].dataset.value).filter(Boolean).map(Number)")
    if figures != sorted(figures):
        return "sorting by SQNR does not sort"
    page.locator("[data-filter]").fill("weight")
    area = page.locator("figure.weights .area").last
    area.scroll_into_view_if_needed()
    area.hover(position={"x": 40, "y": 60})
    if not page.locator(".tip").is_visible():
        return "hovering over a weight shows nothing"
    return None


def main():
    args = arguments()
    browser.enter()
    args.out.mkdir(parents=True, exist_ok=True)
    complaints = []
    with browser.opened() as chromium:
        for page in args.pages:
            complaints += look(chromium, page.resolve(), args.out)
    print(f"screenshots are in {args.out}")
    if complaints:
        sys.exit("\n".join(complaints))


main()
