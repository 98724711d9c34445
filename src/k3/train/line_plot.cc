#include "k3/train/line_plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

namespace k3 {
namespace {

constexpr double kWidth = 720, kHeight = 420, kLeft = 70, kRight = 20, kTop = 40, kBottom = 50;
constexpr std::array<const char*, 8> kColors{"#1f5fbf", "#c0541f", "#2f8f4e", "#8a3fa0",
                                             "#b8860b", "#16808a", "#c23b6b", "#555555"};
constexpr std::size_t kMaxPoints = 400;

using Points = std::vector<std::pair<double, double>>;

std::string Escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '&':
        out += "&amp;";
        break;
      default:
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

std::string Text(double x, double y, const char* anchor, std::string_view text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     Escaped(text));
}

/// A linear axis over [low, high] in pixels, with ticks at multiples of 1, 2 or 5 times a power of
/// ten.
struct Axis {
  double low, high, from, to, tick;

  Axis(double least, double most, double pixel_from, double pixel_to)
      : from(pixel_from), to(pixel_to) {
    if (!(most > least)) most = least + std::max(1e-9, std::abs(least) * 0.1 + 1e-3);
    const double rough = (most - least) / 6, power = std::pow(10, std::floor(std::log10(rough)));
    tick = rough <= power       ? power
           : rough <= 2 * power ? 2 * power
           : rough <= 5 * power ? 5 * power
                                : 10 * power;
    low = std::floor(least / tick) * tick, high = std::ceil(most / tick) * tick;
  }
  double At(double v) const { return from + (v - low) / (high - low) * (to - from); }
  int ticks() const { return static_cast<int>(std::lround((high - low) / tick)); }
};

Points Drawn(const Points& all) {
  Points finite, drawn;
  for (const auto& p : all) {
    if (std::isfinite(p.first) && std::isfinite(p.second)) finite.push_back(p);
  }
  const std::size_t step = (finite.size() + kMaxPoints - 1) / kMaxPoints;
  if (step <= 1) return finite;
  for (std::size_t i = 0; i < finite.size(); i += step) {
    const std::size_t n = std::min(step, finite.size() - i);
    double x = 0, y = 0;
    for (std::size_t j = i; j < i + n; ++j) x += finite[j].first, y += finite[j].second;
    drawn.emplace_back(x / static_cast<double>(n), y / static_cast<double>(n));
  }
  return drawn;
}

std::string Frame(const LinePlot& plot, const Axis& x, const Axis& y) {
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} "
      "{1}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
      kWidth, kHeight);
  out += Text(kLeft, 20, "start", plot.title);
  out += Text((x.from + x.to) / 2, kHeight - 12, "middle", plot.x_label);
  out += Text(kLeft, 35, "end", plot.y_label);
  for (int i = 0; i <= y.ticks(); ++i) {
    const double value = y.low + i * y.tick, at = y.At(value);
    out += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" "
        "stroke=\"#ddd\"/>\n",
        x.from, at, x.to, at);
    out += Text(x.from - 6, at + 4, "end", fmt::format("{:.4g}", value));
  }
  for (int i = 0; i <= x.ticks(); ++i) {
    const double value = x.low + i * x.tick;
    out += Text(x.At(value), y.from + 18, "middle", fmt::format("{:.6g}", value));
  }
  return out;
}

}  // namespace

std::string LinePlotSvg(const LinePlot& plot) {
  std::vector<Points> curves;
  double x0 = INFINITY, x1 = -INFINITY, y0 = INFINITY, y1 = -INFINITY;
  for (const auto& c : plot.curves) {
    curves.push_back(Drawn(c.points));
    for (const auto& [px, py] : curves.back()) {
      x0 = std::min(x0, px), x1 = std::max(x1, px);
      y0 = std::min(y0, py), y1 = std::max(y1, py);
    }
  }
  if (!(x0 <= x1)) x0 = 0, x1 = 1, y0 = 0, y1 = 1;
  const Axis x(x0, x1, kLeft, kWidth - kRight), y(y0, y1, kHeight - kBottom, kTop);
  std::string out = Frame(plot, x, y);
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const char* color = kColors[i % kColors.size()];
    std::string points;
    for (const auto& [px, py] : curves[i])
      points += fmt::format("{:.1f},{:.1f} ", x.At(px), y.At(py));
    out +=
        fmt::format("<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" points=\"{}\"/>\n",
                    color, plot.curves[i].bold ? 3 : 1.5, points);
    const double at = kTop + 16 * static_cast<double>(i + 1);
    out += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"12\" height=\"3\" fill=\"{}\"/>\n",
                       x.to - 160, at - 4, color);
    out += Text(x.to - 142, at, "start", plot.curves[i].name);
  }
  return out + "</svg>\n";
}

}  // namespace k3
