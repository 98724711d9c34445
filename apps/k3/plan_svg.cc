// PlanSvg.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "plan_report.h"

namespace k3::app {
namespace {

constexpr double kWidth = 720, kHeight = 420, kLeft = 90, kRight = 20, kTop = 40, kBottom = 50;

std::string Escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

/// A logarithmic axis over [low, high] in pixels.
struct Axis {
  double low, high, from, to;
  double At(double value) const {
    const double span = std::log2(high / low);
    const double share = span > 0 ? std::log2(std::max(value, low) / low) / span : 0.5;
    return from + share * (to - from);
  }
};

std::string Text(double x, double y, const char* anchor, std::string_view text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     Escaped(text));
}

std::string Curve(const PlanReport& r, const Axis& x, const Axis& y, const char* color, bool all) {
  std::string points;
  for (const MemoryPlan& p : r.sweep) {
    const std::int64_t bytes = all ? p.total_bytes() : p.heap_bytes;
    points += fmt::format("{:.1f},{:.1f} ", x.At(static_cast<double>(p.options.context)),
                          y.At(static_cast<double>(bytes)));
  }
  return fmt::format("<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"2\" points=\"{}\"/>\n",
                     color, points);
}

std::string Line(double x1, double y1, double x2, double y2, const char* style) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1, y1,
                     x2, y2, style);
}

}  // namespace

std::string PlanSvg(const PlanReport& r) {
  double low = 1e18, high = 1;
  for (const MemoryPlan& p : r.sweep) {
    low = std::min(low, static_cast<double>(p.heap_bytes));
    high = std::max(high, static_cast<double>(p.total_bytes()));
  }
  const auto memory = static_cast<double>(r.plan.options.memory);
  if (memory > 0) low = std::min(low, memory), high = std::max(high, memory);
  const double right = kWidth - kRight, bottom = kHeight - kBottom;
  const Axis x{static_cast<double>(r.sweep.front().options.context),
               static_cast<double>(r.sweep.back().options.context), kLeft, right};
  const Axis y{std::exp2(std::floor(std::log2(std::max(low, 1.0)))),
               std::exp2(std::ceil(std::log2(high))), bottom, kTop};
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} "
      "{1}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
      kWidth, kHeight);
  out += Text(kLeft, 20, "start", fmt::format("memory over context: {}", r.model));
  const int ticks = static_cast<int>(std::round(std::log2(y.high / y.low)));
  const int step = std::max(1, ticks / 8);
  for (int i = 0; i <= ticks; i += step) {
    const double bytes = y.low * std::exp2(i), at = y.At(bytes);
    out += Line(kLeft, at, right, at, "stroke=\"#ddd\"");
    out += Text(kLeft - 6, at + 4, "end", BytesText(static_cast<std::int64_t>(bytes)));
  }
  for (const MemoryPlan& p : r.sweep) {
    const double at = x.At(static_cast<double>(p.options.context));
    out += Line(at, bottom, at, bottom + 4, "stroke=\"#888\"");
    const std::int64_t c = p.options.context;
    const std::string name =
        c >= 1024 && c % 1024 == 0 ? fmt::format("{}k", c / 1024) : fmt::format("{}", c);
    out += Text(at, bottom + 18, "middle", name);
  }
  out += Line(kLeft, bottom, right, bottom, "stroke=\"#888\"");
  out += Curve(r, x, y, "#1f5fbf", true) + Curve(r, x, y, "#c0541f", false);
  if (memory > 0) {
    out +=
        Line(kLeft, y.At(memory), right, y.At(memory), "stroke=\"#333\" stroke-dasharray=\"5 4\"");
    out += Text(right, y.At(memory) - 5, "end", "memory " + BytesText(r.plan.options.memory));
  }
  out += Text(kLeft + 10, kHeight - 10, "start",
              "blue: everything; orange: heap alone (state, activations, tables)");
  return out + "</svg>\n";
}

}  // namespace k3::app
